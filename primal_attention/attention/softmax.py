r"""Softmax attention: $o_i = \sum_j softmax_j(q_i^\top k_j / \sqrt C)\, v_j$.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.attention.qkv import DecodingAttention, Mechanism
from primal_attention.precision import accumulate, accumulation_dtype


class KeyValueCache(NamedTuple):
    """Keys and values of the tokens so far: the state that grows with them."""

    k: Tensor  # [B, T, H, C], accumulation dtype
    v: Tensor  # [B, T, H, C]
    mask: Tensor  # [B, T], 1 at real tokens


class SoftmaxAttention(DecodingAttention):
    """Softmax attention through ``scaled_dot_product_attention``."""

    mechanism = Mechanism(
        "Vaswani et al., 2017", "N^2", causal=True, cross=True, decode="keys, values", fused="SDPA"
    )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """SDPA; its causal flag where there is no mask, an explicit mask otherwise."""
        return softmax_attention(q, k, v, source_mask, causal=self.causal)

    def init_state(self, batch_size: int) -> KeyValueCache:
        """An empty cache."""
        self._check_causal()
        weight = self.k_proj.weight
        dtype = accumulation_dtype(weight.dtype)
        empty = torch.zeros(
            batch_size, 0, self.num_heads, self.head_dim, dtype=dtype, device=weight.device
        )
        return KeyValueCache(empty, empty, empty[:, :, 0, 0])

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Attend to the cache and to the new tokens up to each."""
        new = torch.ones(k.shape[:2], device=k.device) if mask is None else mask
        state = KeyValueCache(
            torch.cat([state.k, accumulate(k)], dim=1),
            torch.cat([state.v, accumulate(v)], dim=1),
            torch.cat([state.mask, new.to(state.mask.dtype)], dim=1),
        )
        keys, values = state.k.to(q.dtype), state.v.to(q.dtype)
        return softmax_attention(q, keys, values, state.mask > 0, causal=True), state


def softmax_attention(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, T, H, C]
    v: Tensor,  # [B, T, H, C]
    source_mask: Tensor | None = None,  # [B, T], True = real token
    *,
    causal: bool = False,
) -> Tensor:
    """Softmax attention of all heads, [B, N, H, C]; zero where a query has no key to see.

    Causal with fewer queries than keys: the queries are the last tokens.
    """
    q, k, v = (z.transpose(1, 2) for z in (q, k, v))
    N, T = q.shape[2], k.shape[2]
    if source_mask is None and (not causal or N == T):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    seen = torch.ones(N, T, dtype=torch.bool, device=q.device)
    seen = (seen.tril(T - N) if causal else seen)[None, None]
    if source_mask is not None:
        seen = seen & source_mask[:, None, None, :]
    some = seen.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | ~some)
    return torch.where(some, out, 0.0).transpose(1, 2)
