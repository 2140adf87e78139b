"""The memory of a causal Primal layer: its size does not grow with the tokens seen.

Letters: B batch, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.precision import accumulation_dtype


class PrimalState(NamedTuple):
    """Sums over the real tokens so far, batch first, in at least float32."""

    q_side: Tensor  # static: sum of q [B, H, C]; dual: sum of phi_q h_e^T [B, H, P, S]
    k_side: Tensor  # static: sum of k [B, H, C]; dual: sum of phi_k h_r^T [B, H, P, S]
    num_tokens: Tensor  # [B]
    key_sum: Tensor  # sum of phi_k [B, H, P] for maps with a normaliser, else [B, H, 0]

    @classmethod
    def first(
        cls,
        like: Tensor,  # a parameter of the layer
        batch_size: int,
        num_heads: int,
        side: tuple[int, ...],  # the shape of either sum, of one head
        key_features: int,
    ) -> PrimalState:
        """The state before the first token."""

        def zeros(*shape: int) -> Tensor:
            dtype = accumulation_dtype(like.dtype)  # a plain tensor, also for a sharded parameter
            return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

        sides = zeros(num_heads, *side), zeros(num_heads, *side)
        return cls(*sides, zeros(), zeros(num_heads, key_features))

    @classmethod
    def after(cls, sums: Tensor, num_tokens: Tensor, key_sum: Tensor | None) -> PrimalState:
        """The state from the sums [2, H, B, ...] after the last token; it holds no other memory."""
        q_side, k_side = (side.contiguous() for side in sums.transpose(1, 2))
        if key_sum is None:
            key_sum = q_side.new_zeros(*q_side.shape[:2], 0)
        else:
            key_sum = key_sum[..., -1, :].transpose(0, 1).contiguous()
        return cls(q_side, k_side, num_tokens.to(sums.dtype), key_sum)

    def sums(self) -> Tensor:
        """Both sums, heads first, [2, H, B, ...]."""
        return torch.stack((self.q_side, self.k_side)).transpose(1, 2)
