"""Timed modules: an input [B, N, D] goes in, all that has a gradient comes out.

A layer with an objective returns it beside its outputs in training, and outputs alone otherwise.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions, M
landmarks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention import PrimalAttention
from primal_attention.objectives import ksvd_loss
from primal_attention.ops.primal import Attended, collapsed_attention

Outputs = tuple[Tensor, ...]


class ProjectionFloor(nn.Module):
    """The floor: q and k packed in one projection, and the output projection of an own input."""

    def __init__(self, x: Tensor):
        super().__init__()
        dim = x.shape[-1]
        self.qk_proj, self.out_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.own_input = nn.Parameter(torch.randn_like(x))

    def forward(self, x: Tensor) -> Outputs:
        """Both projections, neither of which waits for the other."""
        return self.qk_proj(x), self.out_proj(self.own_input)


Decoding = Callable[[Tensor], Tensor]  # of the next token [B, D]


class PackedSoftmax(nn.Module):
    """Softmax attention of torch, with q, k and v from one projection."""

    def __init__(self, dim: int, num_heads: int, *, causal: bool):
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Outputs:
        """Attention outputs."""
        return (self._output(*self._heads(x)),)

    def decoding(self, x: Tensor) -> Decoding:
        """Return a step after the tokens x; it overwrites the key and value of the last token."""
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
        causal = self.causal and q.shape == k.shape  # the last token alone sees all others
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return out


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
        """Return a step after the tokens x, always from the same state."""
        _, state = self.layer.prefill(x)
        return lambda x_t: self.layer.step(x_t, state)[0]

    def decoder(self, x: Tensor) -> Decoding:
        """Return the layer's decoder after the tokens x."""
        decoder = self.layer.decoder(len(x))
        decoder.prefill(x)
        return decoder


class ReleasedArithmetic(nn.Module):
    """The released layer, written out from its formulas, as the thing to beat.

    It has data-dependent weights from M landmarks, or is causal with data-independent ones. It
    keeps the features, both scores and their concatenation for the backward pass, has no mask, and
    builds its objective from the explicit scores.
    """

    def __init__(
        self, dim: int, num_heads: int, num_directions: int, num_landmarks: int, *, causal: bool
    ):
        super().__init__()
        self.num_heads, self.num_landmarks, self.causal = num_heads, num_landmarks, causal
        head_dim = dim // num_heads
        rows = head_dim if causal else num_landmarks
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.w_e = nn.Parameter(torch.empty(num_heads, rows, num_directions))
        self.w_r = nn.Parameter(torch.empty(num_heads, rows, num_directions))
        nn.init.orthogonal_(self.w_e)
        nn.init.orthogonal_(self.w_r)
        self.lambda_diag = nn.Parameter(torch.rand(num_heads, num_directions))
        self.score_proj = nn.Linear(2 * num_directions, head_dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Outputs:
        """Return outputs, and in training J^2: mean over tokens, squared for each sequence."""
        y, e, r = self.attend(x)
        return (y, self.objective(e, r)) if self.training else (y,)

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [B, N, D] and the scores e, r [B, H, N, S]."""
        B, N, D = x.shape
        H = self.num_heads
        q = self.q_proj(x).view(B, N, H, -1).transpose(1, 2)  # [B, H, N, C]
        k = self.k_proj(x).view(B, N, H, -1).transpose(1, 2)
        w_e: Tensor = self.w_e
        w_r: Tensor = self.w_r
        if self.causal:
            t = torch.arange(1, N + 1, device=x.device, dtype=x.dtype)[:, None]
            q, k = q.cumsum(2) / t, k.cumsum(2) / t
        else:
            index = torch.linspace(0, N - 1, self.num_landmarks).long().to(x.device)
            sampled = x[:, index].view(B, -1, H, D // H).permute(0, 2, 3, 1)  # [B, H, C, M]
            w_e, w_r = sampled @ w_e, sampled @ w_r
        e, r = F.normalize(q, dim=-1) @ w_e, F.normalize(k, dim=-1) @ w_r
        heads = self.score_proj(torch.cat([e, r], dim=-1))
        return self.out_proj(heads.transpose(1, 2).flatten(2)), e, r

    def objective(self, e: Tensor, r: Tensor) -> Tensor:
        """J^2 from the scores."""
        scaled = (score @ torch.diag_embed(self.lambda_diag) for score in (e, r))
        energies = sum(each.norm(dim=-1).square().mean(2).mean(1) / 2 for each in scaled)
        trace = torch.diagonal(self.w_e.mT @ self.w_r, dim1=-2, dim2=-1).sum(-1).mean()
        squared: Tensor = (energies - trace).square()
        return squared.mean()


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
        B, N, D = x.shape
        C = D // num_heads
        packed = torch.randn(B, N, 2, num_heads, C, device=x.device, dtype=x.dtype)
        self.q, self.k = (z.requires_grad_() for z in packed.unbind(2))
        shape = (num_heads, C, C) if shared else (B, num_heads, C, C)
        self.a_e = nn.Parameter(torch.randn(shape) / C**0.5)
        self.a_r = nn.Parameter(torch.randn(shape) / C**0.5)
        self.bias = nn.Parameter(torch.zeros(C, dtype=x.dtype))

    def forward(self, x: Tensor) -> Outputs:
        """Outputs and both Gram matrices; the input gives the sizes alone."""
        return tuple(collapsed_attention(Attended(self.q, self.k, self.a_e, self.a_r, self.bias)))
