"""The memory of a causal Primal layer: its size does not grow with the tokens seen.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from primal_attention.attention.features import FeaturePair, Side
from primal_attention.ops.chunks import masked
from primal_attention.ops.running_mean import running_mean, token_counts
from primal_attention.ops.scan import scan
from primal_attention.precision import accumulate, accumulation_dtype, exact


class PrimalState(NamedTuple):
    """Sums over the real tokens so far, batch first, in at least float32."""

    q_side: Tensor  # static: sum of q [B, H, C]; dual: sum of phi_q h_e^T [B, H, P, S]
    k_side: Tensor  # static: sum of k [B, H, C]; dual: sum of phi_k h_r^T [B, H, P, S]
    num_tokens: Tensor  # [B]
    key_sum: Tensor  # sum of phi_k [B, H, P] for maps with a normaliser, else [B, H, 0]


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


def scan_both_sides(
    sides: CausalSides,
    h_e: Tensor,  # [B, N, H, S]
    h_r: Tensor,
    state: PrimalState,
    score_maps: tuple[Tensor | None, Tensor | None],  # C_e, C_r [S, C]
    bias: Tensor | None,  # [C]
    token_mask: Tensor | None,
) -> Tensor:
    r"""Head outputs [B, N, H, C] with dual weights that are means over the tokens so far.

    $e_t = \frac{1}{t} \sum_{\tau \le t} h_{r,\tau} \phi_q(x_t)^\top \phi_k(x_\tau)$, and r with the
    sides exchanged. The values are mapped to the output before the scan: no score is kept.
    """
    c_e, c_r = score_maps
    queries, keys = sides.queries, sides.keys
    read_e = None if c_e is None else _scan(h_r, state.k_side, c_e, queries, keys, token_mask)
    read_r = None if c_r is None else _scan(h_e, state.q_side, c_r, keys, queries, token_mask)
    read = sum(part for part in (read_e, read_r) if part is not None)
    assert isinstance(read, Tensor)
    out = read / sides.counts.clamp(min=1)[:, :, None, None]
    if bias is not None:
        out = out + accumulate(bias)
    return masked(out, token_mask).to(h_e.dtype)


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
