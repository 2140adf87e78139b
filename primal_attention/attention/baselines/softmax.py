r"""Softmax attention: $o_i = \sum_j softmax_j(q_i^\top k_j / \sqrt C)\, v_j$.

Flash attention takes no masks, but sequences of different lengths with no padding between them: on
a GPU the real tokens are packed, and the outputs unpacked. Nothing synchronises, and no shape
depends on the masks.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import together
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.ops.op import is_transformed
from primal_attention.precision import accumulate

# Without cuDNN, which torch prefers on Hopper: it put NaN into the gradients of Attention-SH (fewer
# keys than queries, several lengths in one step) unless each step was synchronised (torch 2.11,
# H200, bf16).
_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
_WIDEST = 256  # columns of a head in flash attention


class KeyValueCache(NamedTuple):
    """Keys and values of the tokens so far: a state that grows with them."""

    k: Tensor  # [B, T, H, C], accumulation dtype
    v: Tensor  # [B, T, H, C]
    mask: Tensor  # [B, T], 1 at real tokens

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None) -> KeyValueCache:
        """Return the cache with keys and values [B, N, H, C] of new tokens at its end."""
        new = torch.ones(k.shape[:2], device=k.device) if mask is None else mask
        return KeyValueCache(
            torch.cat([self.k, accumulate(k)], dim=1),
            torch.cat([self.v, accumulate(v)], dim=1),
            torch.cat([self.mask, new.to(self.mask.dtype)], dim=1),
        )

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values in that dtype, and the mask as bool."""
        return self.k.to(dtype), self.v.to(dtype), self.mask > 0


class CachedAttention(DecodingAttention):
    """A mechanism whose decode state is the keys and values of all tokens so far."""

    def init_state(self, batch_size: int) -> KeyValueCache:
        """Return an empty cache."""
        empty = self._zeros(batch_size, 0, self.num_heads, self.head_dim)
        return KeyValueCache(empty, empty, empty[:, :, 0, 0])

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Attend to the cache and to the new tokens up to each: the queries are the last ones."""
        state = state.append(k, v, mask)
        keys, values, real = state.read(q.dtype)
        return self.attend(q, keys, values, mask, real), state

    def num_before(self, state: Any) -> Tensor:
        """Return the number of real tokens in the cache."""
        count: Tensor = state.mask.sum(1)
        return count


class SoftmaxAttention(CachedAttention):
    """Softmax attention through ``scaled_dot_product_attention``.

    Args:
        **options: Those of :class:`QKVAttention`.
    """

    mechanism = Mechanism(
        "Vaswani et al., 2017",
        "N^2",
        causal=True,
        cross=True,
        decode="keys, values",
        fused="SDPA",
        rotary=True,
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """SDPA, or flash attention over the real tokens."""
        return softmax_attention(q, k, v, source_mask, mask=mask, causal=self.causal)


def softmax_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, T, H, C]
    v: Tensor,  # [B, T, H, C]
    source_mask: Tensor | None = None,  # [B, T], True = real token
    *,
    mask: Tensor | None = None,  # [B, N], of the queries whose outputs matter; None: all
    causal: bool = False,
) -> Tensor:
    """Softmax attention of all heads, [B, N, H, C]; zero where a query has no key to see.

    Causal with fewer queries than keys: the queries are the last tokens.
    """
    if source_mask is not None and not causal and takes_packed(q) and not is_transformed():
        return _packed_attention(q, k, v, mask, source_mask)
    if not q.is_cuda or q.shape[1] == k.shape[1]:
        return _masked_attention(q, k, v, source_mask, causal=causal)
    backends = list(_BACKENDS)
    if not torch.compiler.is_compiling():  # compiled code cannot ask which ones are turned off
        backends = [backend for backend, is_on in _BACKENDS.items() if is_on()]  # type: ignore[no-untyped-call]
    with sdpa_kernel(backends):
        return _masked_attention(q, k, v, source_mask, causal=causal)


def _masked_attention(
    q: Tensor, k: Tensor, v: Tensor, source_mask: Tensor | None, *, causal: bool
) -> Tensor:
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))
    N, T = q.shape[2], k.shape[2]
    if source_mask is None and (not causal or N == T):
        return dot_product_attention(q, k, v, causal=causal).transpose(1, 2)
    seen = None if source_mask is None else source_mask[:, None, None, :]
    if causal:  # the last N tokens see T - N keys and those up to themselves
        past = torch.ones(N, T, dtype=torch.bool, device=q.device).tril(T - N)[None, None]
        seen = past if seen is None else past & seen
    assert seen is not None
    some = seen.any(-1, keepdim=True)
    out = dot_product_attention(q, k, v, seen | ~some)
    return torch.where(some, out, 0.0).transpose(1, 2)


def dot_product_attention(
    q: Tensor,  # [B, H, N, C]
    k: Tensor,  # [B, H, T, C]
    v: Tensor,
    mask: Tensor | None = None,  # broadcasts to [B, H, N, T], True where a key is seen
    *,
    causal: bool = False,
) -> Tensor:
    """Call ``scaled_dot_product_attention`` in a form that every mode of autograd takes.

    Forward-mode AD and ``torch.func`` get its products of matrices: the fused kernels have no
    derivative in forward mode, and their backward passes have none at all.
    """
    if is_transformed():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def takes_packed(q: Tensor) -> bool:
    """Return whether flash attention takes queries of this kind, and is on."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return q.shape[-1] % 8 == 0 and q.shape[-1] <= _WIDEST and _flash_runs()


def _flash_runs() -> bool:
    """Ask the device in use; compiled code asks once."""
    on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
    return on and torch.cuda.get_device_capability() >= (8, 0)


# As torch.compiler.assume_constant_result has it, which would import the compiler.
_flash_runs._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor
) -> Tensor:
    """Softmax attention over the real tokens alone; zero at padding and without a key to see."""
    from torch.nn.attention import varlen  # imports the compiler

    keys = together(source_mask)
    if mask is None:
        mask = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    queries = keys if mask is source_mask else together(mask)
    rows, bounds = (queries.pack(q), keys.pack(k), keys.pack(v)), (queries.bounds(), keys.bounds())
    out: Tensor = varlen.varlen_attn(*rows, *bounds, q.shape[1], k.shape[1])  # type: ignore[assignment]
    return queries.unpack(out)
