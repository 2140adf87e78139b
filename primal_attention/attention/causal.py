"""Causal Primal layers: outputs, and a memory whose size does not grow with the tokens seen.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.features import FeaturePair, Side
from primal_attention.attention.weights import dual_moment
from primal_attention.ops.chunks import masked
from primal_attention.ops.dual_causal import DualCausalResult, dual_causal_attention
from primal_attention.ops.primal import gram
from primal_attention.ops.running_mean import running_mean, token_counts
from primal_attention.ops.scan import scan
from primal_attention.precision import accumulate, accumulation_dtype, exact


class PrimalState(NamedTuple):
    """Sums over the real tokens so far, batch first, in at least float32."""

    q_side: Tensor  # static: sum of q [B, H, C]; dual: sum of phi_q h_e^T [B, H, P, S]
    k_side: Tensor  # static: sum of k [B, H, C]; dual: sum of phi_k h_r^T [B, H, P, S]
    num_tokens: Tensor  # [B]
    key_sum: Tensor  # sum of phi_k [B, H, P] for maps with a normaliser, else [B, H, 0]


def first_state(
    like: Tensor,  # a parameter of the layer
    batch_size: int,
    num_heads: int,
    side: tuple[int, ...],  # the shape of either sum, of one head
    key_features: int,
) -> PrimalState:
    """The state before the first token."""

    def zeros(*shape: int) -> Tensor:
        dtype = accumulation_dtype(like.dtype)  # a plain tensor, whatever kind the parameter is of
        return torch.zeros(batch_size, *shape, dtype=dtype, device=like.device)

    sides = zeros(num_heads, *side), zeros(num_heads, *side)
    return PrimalState(*sides, zeros(), zeros(num_heads, key_features))


class CausalSides(NamedTuple):
    """Both sides of the kernel at each token, seen from that token."""

    queries: Side
    keys: Side
    counts: Tensor  # [B, N]: real tokens up to each
    key_sum: Tensor  # [B, H, P] or [B, H, 0], after the last token


def causal_sides(
    features: FeaturePair, q: Tensor, k: Tensor, state: PrimalState, token_mask: Tensor | None
) -> CausalSides:
    """Features of queries and keys [B, N, H, C], normalised over the tokens up to each."""
    counts = token_counts(q, token_mask, state.num_tokens)
    queries, keys = features.queries(q), features.keys(k)
    key_sum = features.running_key_sum(keys, token_mask, state.key_sum)
    last = state.key_sum if key_sum is None else key_sum[:, -1]
    return CausalSides(*features.normalise(queries, keys, key_sum), counts, last)


def mean_sides(
    features: FeaturePair, q: Tensor, k: Tensor, state: PrimalState, token_mask: Tensor | None
) -> tuple[CausalSides, PrimalState]:
    """Features of the running means of q and k: the causal form with static weights."""
    counts = token_counts(q, token_mask, state.num_tokens)
    q_mean = running_mean(q, counts, token_mask=token_mask, before=state.q_side)
    k_mean = running_mean(k, counts, token_mask=token_mask, before=state.k_side)
    sides = causal_sides(features, q_mean.mean, k_mean.mean, state, token_mask)
    return sides, PrimalState(q_mean.total, k_mean.total, last_count(counts, q), sides.key_sum)


def last_count(counts: Tensor, q: Tensor) -> Tensor:
    """The count after the last token, in the dtype of the state."""
    return counts[:, -1].to(accumulation_dtype(q.dtype))


class DualInputs(NamedTuple):
    """What the projections of a layer with dual weights give."""

    q: Tensor  # [B, N, H, C]
    k: Tensor
    h: Tensor  # [B, N, 2, H, S]: h_e and h_r


def dual_outputs(
    features: FeaturePair,
    inputs: DualInputs,
    state: PrimalState,
    score_maps: tuple[Tensor | None, Tensor | None],  # C_e, C_r [S, C]
    bias: Tensor | None,  # [C]
    token_mask: Tensor | None,
    *,
    grams: bool,
) -> tuple[DualCausalResult, PrimalState]:
    r"""Head outputs [B, N, H, C] with dual weights that are means over the tokens so far.

    $e_t = \frac{1}{t} \sum_{\tau \le t} h_{r,\tau} \phi_q(x_t)^\top \phi_k(x_\tau)$, and r with the
    sides exchanged. No score is kept.
    """
    if features.has_modules:
        sides = causal_sides(features, inputs.q, inputs.k, state, token_mask)
        result = _scan_both_sides(sides, inputs.h, state, score_maps, bias, token_mask)
        if grams:
            gram_q, gram_k = (_gram(side, token_mask) for side in (sides.queries, sides.keys))
            result = result._replace(gram_q=gram_q, gram_k=gram_k)
        counts, key_sum = sides.counts, sides.key_sum
    else:
        counts, key_sum = token_counts(inputs.q, token_mask, state.num_tokens), state.key_sum
        result = dual_causal_attention(
            *inputs,
            *score_maps,
            bias,
            state.q_side,
            state.k_side,
            counts=counts,
            token_mask=token_mask,
            map_q=features.names[0],
            map_k=features.names[1],
            grams=grams,
        )
    last = last_count(counts, inputs.q)
    return result, PrimalState(result.q_side, result.k_side, last, key_sum)


def _scan_both_sides(
    sides: CausalSides,
    h: Tensor,  # [B, N, 2, H, S]
    state: PrimalState,
    score_maps: tuple[Tensor | None, Tensor | None],
    bias: Tensor | None,
    token_mask: Tensor | None,
) -> DualCausalResult:
    """The same for features that a module makes, by two scans; without Gram matrices."""
    (c_e, c_r), (h_e, h_r) = score_maps, h.unbind(2)
    queries, keys = sides.queries, sides.keys
    read_e = None if c_e is None else _scan(h_r, state.k_side, c_e, queries, keys, token_mask)
    read_r = None if c_r is None else _scan(h_e, state.q_side, c_r, keys, queries, token_mask)
    read = sum(part for part in (read_e, read_r) if part is not None)
    assert isinstance(read, Tensor)
    out = read / sides.counts.clamp(min=1)[:, :, None, None]
    if bias is not None:
        out = out + accumulate(bias)
    return DualCausalResult(
        masked(out, token_mask).to(h.dtype),
        state.q_side + dual_moment(queries, h_e, token_mask),
        state.k_side + dual_moment(keys, h_r, token_mask),
        h.new_empty(0),
        h.new_empty(0),
    )


@exact
def _scan(
    h: Tensor, before: Tensor, c: Tensor, near: Side, far: Side, token_mask: Tensor | None
) -> Tensor:
    return scan(
        near.z,
        far.z,
        h,
        c,
        before @ accumulate(c),
        token_mask=token_mask,
        map_q=near.feature_map,
        map_k=far.feature_map,
    ).out


def _gram(side: Side, token_mask: Tensor | None) -> Tensor:
    return gram(side.z, token_mask=token_mask, feature_map=side.feature_map)
