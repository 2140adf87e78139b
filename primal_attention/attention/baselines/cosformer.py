r"""cosFormer: linear attention whose weights fall with the distance like a cosine.

Letters: B batch, N tokens, T source tokens, H heads, C head dim.
"""

import math
from typing import ClassVar, NamedTuple, Unpack

import torch
from torch import Tensor

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeatureSide
from primal_attention.attention.base.linear_core import (
    LinearState,
    MomentsAttention,
    attend_moments,
    scan_moments,
)
from primal_attention.attention.base.qkv import Options
from primal_attention.attention.base.validation import check_sizes
from primal_attention.feature_maps import relu
from primal_attention.ops.causal import token_counts
from primal_attention.precision import accumulate

_CAUSAL_TOKENS = 4096


class CosformerState(NamedTuple):
    """Sums over the real tokens so far, and how many they are."""

    kv: Tensor  # [B, H, 2C, C]
    k_sum: Tensor  # [B, H, 2C]
    num_tokens: Tensor  # [B]


class CosformerAttention(MomentsAttention):
    r"""Linear attention with rectified features and cosine re-weighting, Qin et al. 2022.

    $y_i = \sum_j s_{ij} v_j / \sum_j s_{ij}$ with
    $s_{ij} = relu(q_i)^\top relu(k_j) \cos(\frac{\pi}{2} \frac{i - j}{M})$, where i and j count
    the real tokens. By $\cos(a - b) = \cos a \cos b + \sin a \sin b$ the weights are products of
    2C features, so the cost is linear.

    M is ``max_tokens``, or, where that is None, the number of real tokens of the sequence (the
    larger of the two numbers with a context), as published.

    Args:
        max_tokens: Longest sequence, and the scale M of the distances; beyond it weights would be
            negative, so longer inputs are a ValueError. For a causal layer, which cannot know the
            number of tokens to come, None is 4,096.
        **options: Those of :class:`QKVAttention`.
    """

    mechanism = Mechanism(
        "Qin et al., 2022",
        "N",
        causal=True,
        cross=True,
        decode="sums of features and of features times values, number of tokens",
        needs_max_tokens=True,
        rank_bound=lambda layer: layer.num_features,
        sums_over_queries=lambda layer: True,
    )
    shown = ("max_tokens",)
    least = 1e-6  # of the normaliser, as published
    contract_exemptions: ClassVar[dict[str, str]] = {
        "autocast": "the gradient of relu jumps where rounding moves a feature across 0: outputs "
        "differ by 0.4 % of their norm, gradients by 2 to 9 %"
    }

    def __init__(
        self, dim: int, num_heads: int, *, max_tokens: int | None = None, **options: Unpack[Options]
    ):
        super().__init__(dim, num_heads, **options)
        check_sizes(max_tokens=max_tokens)
        self.max_tokens = _CAUSAL_TOKENS if self.causal and max_tokens is None else max_tokens

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Attend by the moment form, scanned where causal."""
        self._check_length(max(q.shape[1], k.shape[1]))
        counts, source_counts = token_counts(q, mask, None), token_counts(k, source_mask, None)
        scale = self._scale(counts, source_counts)
        phi_q, phi_k = _features(q, counts, scale), _features(k, source_counts, scale)
        if self.causal:
            return scan_moments(phi_q, phi_k, v, None, mask, least=self.least)[0]
        return attend_moments(phi_q, phi_k, v, source_mask, least=self.least)

    @property
    def num_features(self) -> int:
        """Two for each channel."""
        return 2 * self.head_dim

    def init_state(self, batch_size: int) -> CosformerState:
        """Return the sums before the first token: zeros."""
        kv, k_sum = super().init_state(batch_size)
        return CosformerState(kv, k_sum, kv[:, 0, 0, 0])

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: CosformerState, mask: Tensor | None
    ) -> tuple[Tensor, CosformerState]:
        """Go on from the sums; outside a compiled graph the number of tokens is checked."""
        counts = token_counts(q, mask, state.num_tokens)
        last = counts[:, -1]
        self._check_length(q.shape[1])
        if not torch.compiler.is_compiling():
            self._check_length(int(last.max()))
        scale = self._scale(counts, counts)
        phi_q, phi_k = _features(q, counts, scale), _features(k, counts, scale)
        before = LinearState(state.kv, state.k_sum)
        out, moments = scan_moments(phi_q, phi_k, v, before, mask, least=self.least)
        return out, CosformerState(*moments, last)

    def _scale(self, counts: Tensor, source_counts: Tensor) -> Tensor:
        """M for each sequence, [B, 1, 1, 1]."""
        longest = torch.maximum(counts[:, -1], source_counts[:, -1]).clamp(min=1)
        if self.max_tokens is not None:
            longest = torch.full_like(longest, self.max_tokens)
        return longest[:, None, None, None]

    def _check_length(self, length: int) -> None:
        if self.max_tokens is not None and length > self.max_tokens:
            raise ValueError(f"at most max_tokens={self.max_tokens} tokens, got {length}")


def _features(z: Tensor, counts: Tensor, scale: Tensor) -> FeatureSide:
    """Rectified queries or keys times cosine and sine of their angles, [B, N, H, 2C]."""
    z = relu(accumulate(z))
    position = (counts[:, :, None, None] - 1).to(z.dtype)
    angle = math.pi / 2 * position / scale
    return FeatureSide(torch.cat([z * angle.cos(), z * angle.sin()], dim=-1))
