"""One run of a Primal layer, from its projections to the outputs of its heads.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from primal_attention.attention.causal import DualInputs, PrimalState, dual_outputs, mean_sides
from primal_attention.attention.features import FeaturePair, Side
from primal_attention.attention.masks import Tokens, num_real
from primal_attention.attention.packing import PackedProjection
from primal_attention.attention.statistics import Grams, Scored
from primal_attention.attention.weights import (
    ProjectionWeights,
    dual_moment,
    sampled_weights,
    token_mean,
)
from primal_attention.ops.collapse import collapse
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.primal import PrimalResult, collapsed_attention, gram
from primal_attention.ops.projected import ProjectedResult, projected_attention
from primal_attention.ops.projected_dual import projected_dual_attention
from primal_attention.ops.projected_dual_causal import projected_dual_causal_attention
from primal_attention.ops.projected_scores import projected_scores

T = TypeVar("T")


class Parts(NamedTuple):
    """What of a layer stands between its projections and its output projection."""

    features: FeaturePair
    parameters: tuple[Tensor, Tensor] | None  # w_e, w_r; None for dual weights
    score_maps: tuple[Tensor | None, Tensor | None]  # C_e, C_r [S, C]; None where not output
    bias: Tensor | None  # [C]
    num_heads: int
    score_proj: Callable[[Tensor], Tensor] | None  # to be called; the maps then give [e; r] as such


class Projected(NamedTuple):
    """The tokens of a batch after the projections."""

    q: Tensor | None  # [B, N, H, C]; None where the tokens are only a context
    k: Tensor
    h: Tensor | None  # [B, N, 2, H, S]: H_e and H_r; None unless weights are dual
    mask: Tensor | None  # [B, N], True at real tokens


class Pass(NamedTuple):
    """What a run gives."""

    out: Tensor  # [B, N, H, C]; or the scores [B, N, 2, H, S], with sums of the scored kind
    weights: ProjectionWeights
    sums: Grams | Scored  # Gram matrices are empty unless asked for


def bidirectional_pass(
    parts: Parts,
    tokens: Projected,
    source: Projected,
    landmarks: Landmarks | None,
    *,
    grams: bool,
) -> Pass:
    """Queries of the tokens, keys of the source; the same sequence in self-attention."""
    features, crossing = parts.features, source is not tokens
    queries, keys = features.queries(_given(tokens.q)), features.keys(tokens.k)
    source_keys = features.keys(source.k) if crossing else keys
    key_sum = features.key_sum(source_keys, source.mask)
    queries, keys = features.normalise(queries, keys, key_sum)
    if not crossing:
        source_keys = keys
    elif key_sum is not None:
        source_queries = features.queries(_given(source.q))
        _, source_keys = features.normalise(source_queries, source_keys, key_sum)
    weights = _weights_given(parts, (tokens, queries), (source, source_keys), landmarks)
    wanted = grams, grams and not crossing
    result = attend(parts, queries, keys, weights, tokens.mask, wanted)
    gram_k = result.gram_k
    if grams and crossing:
        gram_k = gram(source_keys.z, token_mask=source.mask, feature_map=source_keys.feature_map)
    return Pass(result.out, weights, Grams(result.gram_q, gram_k))


def _weights_given(
    parts: Parts,
    tokens: tuple[Projected, Side],
    source: tuple[Projected, Side],
    landmarks: Landmarks | None,
) -> ProjectionWeights:
    """Weights given the sequences: W_e from the keys' side, W_r from the queries' (eq. 14)."""
    if landmarks is not None:
        return sampled_weights(landmarks, *_given(parts.parameters), *parts.score_maps)
    if parts.parameters is not None:
        return ProjectionWeights(*parts.parameters)
    (here, queries), (there, keys) = tokens, source
    h_e, h_r = _given(here.h)[:, :, 0], _given(there.h)[:, :, 1]
    return ProjectionWeights(
        token_mean(dual_moment(keys, h_r, there.mask), num_real(h_r, there.mask)),
        token_mean(dual_moment(queries, h_e, here.mask), num_real(h_e, here.mask)),
    )


def attend(
    parts: Parts,
    queries: Side,
    keys: Side,
    weights: ProjectionWeights,
    token_mask: Tensor | None,
    grams: tuple[bool, bool],
) -> PrimalResult:
    """Outputs of the heads, and the Gram matrices that are wanted."""
    if weights.landmarks is None:
        a_e, a_r = collapse(weights.e, weights.r, *parts.score_maps)
    else:  # they came with the weights
        a_e, a_r = weights.a_e, weights.a_r
    return collapsed_attention(
        queries.z,
        keys.z,
        a_e,
        a_r,
        parts.bias,
        token_mask=token_mask,
        map_q=queries.feature_map,
        map_k=keys.feature_map,
        gram_q=grams[0],
        gram_k=grams[1],
    )


def projected_pass(
    parts: Parts,
    tokens: Tokens,
    projection: PackedProjection,
    landmarks: Landmarks | None,
    *,
    causal: bool,
    grams: bool,
) -> Pass:
    """Self-attention with all projections in the same op; causal without landmarks alone."""
    result = _projected_result(parts, tokens, projection, landmarks, causal=causal, grams=grams)
    weights = ProjectionWeights(result.e, result.r, landmarks)
    return Pass(result.out, weights, Grams(result.gram_q, result.gram_k))


def scored_pass(
    parts: Parts,
    tokens: Tokens,
    projection: PackedProjection,
    landmarks: Landmarks | None,
    *,
    causal: bool,
) -> Pass:
    """Self-attention up to the scores, for an output projection that maps these.

    Not with dual weights; causal without landmarks alone.
    """
    map_q, map_k = parts.features.names
    made = projected_scores(
        tokens.x,
        *projection,
        *_given(parts.parameters),
        landmarks,
        causal=causal,
        token_mask=tokens.mask,
        map_q=map_q,
        map_k=map_k,
    )
    sums = Scored(made.energies, made.qk, tokens.mask, (map_q, map_k))
    return Pass(made.scores, ProjectionWeights(made.e, made.r, landmarks), sums)


def _projected_result(
    parts: Parts,
    tokens: Tokens,
    projection: PackedProjection,
    landmarks: Landmarks | None,
    *,
    causal: bool,
    grams: bool,
) -> ProjectedResult:
    map_q, map_k = parts.features.names
    if parts.parameters is None:
        attention = projected_dual_causal_attention if causal else projected_dual_attention
        return attention(
            tokens.x,
            *projection,
            *parts.score_maps,
            parts.bias,
            num_heads=parts.num_heads,
            token_mask=tokens.mask,
            map_q=map_q,
            map_k=map_k,
            gram_q=grams,
            gram_k=grams,
        )
    return projected_attention(
        tokens.x,
        *projection,
        *parts.parameters,
        *parts.score_maps,
        parts.bias,
        landmarks,
        causal=causal,
        token_mask=tokens.mask,
        map_q=map_q,
        map_k=map_k,
        gram_q=grams,
        gram_k=grams,
    )


def causal_pass(
    parts: Parts, tokens: Projected, state: PrimalState, *, grams: bool
) -> tuple[Pass, PrimalState]:
    """The tokens that follow a state, and the state after them."""
    features, q, k, mask = parts.features, _given(tokens.q), tokens.k, tokens.mask
    if parts.parameters is not None:
        sides, state = mean_sides(features, q, k, state, mask)
        weights = ProjectionWeights(*parts.parameters)
        result = attend(parts, sides.queries, sides.keys, weights, mask, (grams, grams))
        return Pass(result.out, weights, Grams(result.gram_q, result.gram_k)), state
    inputs = DualInputs(q, k, _given(tokens.h))
    dual, state = dual_outputs(
        features, inputs, state, parts.score_maps, parts.bias, mask, grams=grams
    )
    n = state.num_tokens
    weights = ProjectionWeights(token_mean(state.k_side, n), token_mean(state.q_side, n))
    return Pass(dual.out, weights, Grams(dual.gram_q, dual.gram_k)), state


def _given(value: T | None) -> T:
    assert value is not None
    return value
