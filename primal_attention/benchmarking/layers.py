"""What is timed, as modules: an input [B, N, D] goes in, all that has a gradient comes out.

A layer with an objective returns it beside its outputs in training, and outputs alone otherwise.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention import PrimalAttention
from primal_attention.benchmarking.released import (
    ReleasedArithmetic,
)
from primal_attention.objectives import ksvd_loss
from primal_attention.ops.primal import Attended, collapsed_attention

Outputs = tuple[Tensor, ...]


class Projections(nn.Module):
    """The floor: q and k packed in one projection, and the output projection of an own input."""

    def __init__(self, x: Tensor):
        super().__init__()
        dim = x.shape[-1]
        self.qk_proj, self.out_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.own_input = nn.Parameter(torch.randn_like(x))

    def forward(self, x: Tensor) -> Outputs:
        """Both projections, neither of which waits for the other."""
        return self.qk_proj(x), self.out_proj(self.own_input)


Attend = Callable[..., Tensor]
Decoding = Callable[[Tensor], Tensor]  # of the next token [B, D]


class PackedSoftmax(nn.Module):
    """Softmax attention with q, k and v from one projection, by ``attend(q, k, v)``."""

    def __init__(self, dim: int, num_heads: int, attend: Attend):
        super().__init__()
        self.num_heads, self.attend = num_heads, attend
        self.qkv_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Outputs:
        """Attention outputs."""
        return (self._output(*self._heads(x)),)

    def decoding(self, x: Tensor) -> Decoding:
        """A step after the tokens x: it writes its key and value over those of the last of them."""
        _, *cache = (z.contiguous() for z in self._heads(x))

        def step(x_t: Tensor) -> Tensor:
            q, *new = self._heads(x_t[:, None])
            for old, z in zip(cache, new, strict=True):
                old[:, :, -1:] = z
            return self._output(q, *cache)[:, 0]

        return step

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [B, H, N, C]
        return q, k, v

    def _output(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attend = self.attend if q.shape == k.shape else F.scaled_dot_product_attention
        y: Tensor = self.out_proj(attend(q, k, v).transpose(1, 2).flatten(2))
        return y


def sdpa(*, causal: bool) -> Attend:
    """PyTorch's ``scaled_dot_product_attention``."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def flex(num_tokens: int, device: torch.device, *, causal: bool) -> Attend:
    """PyTorch's ``flex_attention``, which is fused only when it is compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    mask = None
    if causal:
        mask = create_block_mask(sees, None, None, num_tokens, num_tokens, device=str(device))
    torch.compiler.reset()  # else the shapes before this one count against a limit
    fused: Any = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = fused(q, k, v, block_mask=mask)
        return out

    return attend


class WithObjective(nn.Module):
    """Primal-Attention and its objective."""

    def __init__(self, layer: PrimalAttention):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Outputs:
        """Outputs, and in training the objective."""
        y = self.layer(x)
        return (y, ksvd_loss(self.layer)) if self.training else (y,)

    def decoding(self, x: Tensor) -> Decoding:
        """A step after the tokens x, always from the same state."""
        _, state = self.layer.prefill(x)
        return lambda x_t: self.layer.step(x_t, state)[0]

    def decoder(self, x: Tensor) -> Decoding:
        """The layer's decoder after the tokens x."""
        decoder = self.layer.decoder(len(x))
        decoder.prefill(x)
        return decoder


class Released(nn.Module):
    """The released arithmetic and its objective."""

    def __init__(self, layer: ReleasedArithmetic):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Outputs:
        """Outputs, and in training the objective."""
        y, e, r = self.layer.attend(x)
        return (y, self.layer.objective(e, r)) if self.training else (y,)


class OutputsOf(nn.Module):
    """Any layer whose outputs are what it returns, or the first of what it returns."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Outputs:
        """Attention outputs."""
        y = self.layer(x)
        return (y[0] if isinstance(y, tuple) else y,)


class OpAlone(nn.Module):
    """The op of Primal-Attention by itself: q and k are the halves of one projection."""

    def __init__(self, x: Tensor, num_heads: int, *, shared: bool):
        super().__init__()
        B, _, D = x.shape
        C = D // num_heads
        self.q, self.k = _halves(x, num_heads)
        shape = (num_heads, C, C) if shared else (B, num_heads, C, C)
        self.a_e = nn.Parameter(torch.randn(shape) / C**0.5)
        self.a_r = nn.Parameter(torch.randn(shape) / C**0.5)
        self.bias = nn.Parameter(torch.zeros(C, dtype=x.dtype))

    def forward(self, x: Tensor) -> Outputs:
        """Outputs and both Gram matrices; the input gives the sizes alone."""
        return tuple(collapsed_attention(Attended(self.q, self.k, self.a_e, self.a_r, self.bias)))


def _halves(x: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, N, H, C] as one projection of x would give them."""
    B, N, D = x.shape
    packed = torch.randn(B, N, 2, num_heads, D // num_heads, device=x.device, dtype=x.dtype)
    q, k = (z.requires_grad_() for z in packed.unbind(2))
    return q, k
