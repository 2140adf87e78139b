r"""Softmax attention: $o_i = \sum_j softmax_j(q_i^\top k_j / \sqrt C)\, v_j$.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.projections import outputs_of
from primal_attention.attention.base.qkv import DecodingAttention
from primal_attention.attention.baselines.sdpa import dot_product_attention
from primal_attention.attention.baselines.varlen import takes, varlen_attention
from primal_attention.ops.gradients import is_transformed
from primal_attention.precision import accumulate, accumulation_dtype

#   cuDNN's attention, which torch prefers on Hopper, put NaN into the gradients of Attention-SH
#   (fewer keys than queries, several lengths in one step) unless each step was waited for:
#   torch 2.11, H200, bf16.
_WITHOUT_CUDNN = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class KeyValueCache(NamedTuple):
    """Keys and values of the tokens so far: the state that grows with them."""

    k: Tensor  # [B, T, H, C], accumulation dtype
    v: Tensor  # [B, T, H, C]
    mask: Tensor  # [B, T], 1 at real tokens

    @classmethod
    def empty(cls, batch_size: int, num_heads: int, head_dim: int, like: Tensor) -> KeyValueCache:
        """The cache before the first token, for keys and values of the kind of a tensor."""
        dtype = accumulation_dtype(like.dtype)
        empty = torch.zeros(batch_size, 0, num_heads, head_dim, dtype=dtype, device=like.device)
        return cls(empty, empty, empty[:, :, 0, 0])

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None) -> KeyValueCache:
        """The cache with the keys and values [B, N, H, C] of new tokens at its end."""
        new = torch.ones(k.shape[:2], device=k.device) if mask is None else mask
        return KeyValueCache(
            torch.cat([self.k, accumulate(k)], dim=1),
            torch.cat([self.v, accumulate(v)], dim=1),
            torch.cat([self.mask, new.to(self.mask.dtype)], dim=1),
        )

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values in that dtype, and the mask as bool."""
        return self.k.to(dtype), self.v.to(dtype), self.mask > 0


class SoftmaxAttention(DecodingAttention):
    """Softmax attention through ``scaled_dot_product_attention``.

    Args:
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        gate: Multiply the outputs of the heads by the silu of a projection of the token.
        rotary: Turn queries and keys by their positions among the real tokens.
        causal: Each token sees itself and those before it.
        dropout: Probability of dropout after the output projection.
        bias: Whether the projections have a bias.
    """

    mechanism = Mechanism(
        "Vaswani et al., 2017", "N^2", causal=True, cross=True, decode="keys, values", fused="SDPA"
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """SDPA, or flash attention over the real tokens."""
        return softmax_attention(q, k, v, source_mask, mask=mask, causal=self.causal)

    def init_state(self, batch_size: int) -> KeyValueCache:
        """An empty cache."""
        self._check_causal()
        like = outputs_of(self.k_proj)
        return KeyValueCache.empty(batch_size, self.num_heads, self.head_dim, like)

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Attend to the cache and to the new tokens up to each."""
        state = state.append(k, v, mask)
        return softmax_attention(q, *state.read(q.dtype), causal=True), state

    def num_before(self, state: KeyValueCache) -> Tensor:
        """The real tokens in the cache."""
        return state.mask.sum(1)


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
    if source_mask is not None and not causal and takes(q) and not is_transformed():
        return varlen_attention(q, k, v, mask, source_mask)
    if q.is_cuda and q.shape[1] != k.shape[1]:
        with sdpa_kernel(_chosen_without_cudnn()):
            return _softmax_attention(q, k, v, source_mask, causal=causal)
    return _softmax_attention(q, k, v, source_mask, causal=causal)


def _chosen_without_cudnn() -> list[SDPBackend]:
    """Those that the caller has not turned off; compiled code cannot ask, and takes all."""
    if torch.compiler.is_compiling():
        return _WITHOUT_CUDNN
    is_on = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    return [backend for backend in _WITHOUT_CUDNN if is_on[backend]()]  # type: ignore[no-untyped-call]


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, source_mask: Tensor | None, *, causal: bool
) -> Tensor:
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))
    N, T = q.shape[2], k.shape[2]
    if source_mask is None and (not causal or N == T):
        return dot_product_attention(q, k, v, causal=causal).transpose(1, 2)
    seen = _up_to_itself(N, T, q.device)[None, None] if causal else None
    if source_mask is not None:
        real = source_mask[:, None, None, :]  # not written out for each query
        seen = real if seen is None else seen & real
    assert seen is not None
    some = seen.any(-1, keepdim=True)
    out = dot_product_attention(q, k, v, seen | ~some)
    return torch.where(some, out, 0.0).transpose(1, 2)


def _up_to_itself(N: int, T: int, device: torch.device) -> Tensor:
    """Which of T keys the last N tokens see, [N, T]."""
    return torch.ones(N, T, dtype=torch.bool, device=device).tril(T - N)
