"""Linear attention; the normaliser and the moments are those of ``base.linear_core``.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, P feature dim.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.features import FeaturePair, FeatureSide
from primal_attention.attention.base.inputs import Tokens
from primal_attention.attention.base.linear_core import (
    LinearState,
    MomentsAttention,
    attend_moments,
    key_moment,
    read_moment,
    scan_moment,
    scan_moments,
)
from primal_attention.attention.base.positions import TimedLayer, rms_normed
from primal_attention.attention.base.qkv import Options
from primal_attention.attention.svr.scaled_heads import (
    KeysAndValues,
    attend_at_scales,
    check_scales,
)
from primal_attention.feature_maps import FeatureMapSpec

_NO_MATRIX = "linear with decay or score_norm makes its outputs of more than features"


class LinearAttention(MomentsAttention, TimedLayer):
    r"""Attention with the kernel $\phi(q)^\top \phi(k)$, Katharopoulos et al. 2020.

    The normaliser counts real tokens only; where it is zero the output is zero.

    Args:
        feature_map: ``elu`` (the paper's elu + 1), ``relu``, ``exponential``, ``cosine``,
            ``identity``, a :class:`~primal_attention.feature_maps.FeatureMap`, or a pair (queries,
            keys) of these. The last two names have kernels of both signs, with a normaliser that
            may come near zero.
        scales: How many tokens make one key, for each head: Attention-SH of Nguyen et al. 2023 in
            linear attention, not causal; None for one each.
        decay: Weigh the kernel by $e^{-|a_i - a_j|}$ of a time a that grows at each token:
            ``"fixed"``, by a step that the head learns, or ``"learned"``, by one that is projected
            from the token. Not causal, it acts in both directions. Without a context and scales.
        score_norm: Divide the outputs of each head by their root mean square, with a learned gain,
            in place of the normaliser.
        **options: Those of :class:`QKVAttention`.
    """

    mechanism = Mechanism(
        "Katharopoulos et al., 2020",
        "N",
        causal=True,
        cross=True,
        decode="sums of features and of features times values",
        rank_bound=lambda layer: layer.features.feature_dim,
        no_matrix=lambda layer: _NO_MATRIX if layer.decay or layer.score_norm else None,
    )

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: FeatureMapSpec = "elu",
        scales: Sequence[int] | None = None,
        decay: str | None = None,
        score_norm: bool = False,
        **options: Unpack[Options],
    ):
        if options.get("causal") and scales is not None:
            raise ValueError(f"scales={list(scales)} does not go with causal=True; use softmax_sh")
        if scales is not None and (decay is not None or score_norm):
            raise ValueError(
                f"scales={list(scales)} does not go with decay={decay!r} and score_norm="
                f"{score_norm}: pooled keys have no time, and sums of several scales no norm"
            )
        super().__init__(dim, num_heads, **options)
        self.features = FeaturePair(feature_map, self.head_dim)
        self.scales = check_scales(scales, num_heads)
        self.add_time(decay, dim, num_heads, normalised=self.features.normalised)
        self.score_norm = score_norm
        if score_norm:
            self.score_gain = nn.Parameter(torch.empty(self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the gain at 1 and the shares that heads with a fixed decay keep."""
        if self.score_norm:
            nn.init.ones_(self.score_gain)
        self.reset_time()

    @property
    def num_features(self) -> int:
        """P."""
        return self.features.feature_dim

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Attend by one sum over all keys, or one for each scale, or the scan if causal."""
        if self.causal:
            return self.extend(q, k, v, None, mask)[0]
        source = KeysAndValues(k, v, source_mask)
        return attend_at_scales(self.scales, q, source, self._attend_to)

    def _attend_to(self, q: Tensor, source: KeysAndValues, heads: slice) -> Tensor:
        (queries, keys), v = self._both(q, source.k), source.v
        if not self.score_norm:
            return attend_moments(queries, keys, v, source.mask)
        return self._normed(read_moment(key_moment(keys, v, source.mask), queries), v)

    def _attended(self, tokens: Tokens, source: Tokens) -> Tensor:
        if self.decay is None:
            return super()._attended(tokens, source)
        if source is not tokens:
            self.check_no_context()
        return self._extended(tokens, None)[0]

    def _extended(self, tokens: Tokens, state: LinearState | None) -> tuple[Tensor, LinearState]:
        qkv, steps = self._project(tokens, tokens), self.time_steps(*tokens)
        return self.extend(*qkv, state, tokens.mask, steps)

    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: LinearState | None,
        mask: Tensor | None,
        steps: Tensor | None = None,
    ) -> tuple[Tensor, LinearState]:
        """Go on from the moments, or from none, by so much time at each token."""
        queries, keys = self._both(q, k)
        if not self.score_norm:
            return scan_moments(queries, keys, v, state, mask, steps, causal=self.causal)
        before, future = None if state is None else state.kv, not self.causal
        read, kv = scan_moment(queries, keys, v, before, mask, steps, future=future)
        return self._normed(read, v), LinearState(kv, kv.new_zeros(kv.shape[:-1]))

    def _both(self, q: Tensor, k: Tensor) -> tuple[FeatureSide, FeatureSide]:
        """Both sides, of which the normaliser must not underflow."""
        queries = self.features.queries(q)
        return queries if self.score_norm else in_range(queries), self.features.keys(k)

    def _normed(self, out: Tensor, v: Tensor) -> Tensor:
        return rms_normed(out, self.score_gain).to(v.dtype)


def in_range(queries: FeatureSide) -> FeatureSide:
    """Raise queries where all features of one are exponentials that might underflow.

    elu + 1 is exp on the negative side: there a shift of the whole query is a factor of all its
    features, which the normaliser cancels.
    """
    if queries.feature_map != "elu":
        return queries
    highest = queries.z.detach().amax(-1, keepdim=True)
    return queries._replace(z=queries.z - highest.clamp(max=0.0))
