"""Causal Primal-Attention with dual weights as fused ops: one walk forward, one backward.

The kernel values of a block serve both sides; scores and their means stay in registers. The forward
pass leaves the sums before each block, so that the backward pass needs no walk of its own to make
them again. README.md counts the work.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.column_sum.triton_add_up import add_up
from primal_attention.ops.dual_causal.sizes import (
    BACKWARD,
    FORWARD,
    SUMS,
    dims,
    fused_states,
    key,
    score_stages,
    takes,
)
from primal_attention.ops.dual_causal.triton_blocks import segment_gradients, segment_sums
from primal_attention.ops.dual_causal.triton_gradient_walks import backward_walk
from primal_attention.ops.dual_causal.triton_running import Side, running
from primal_attention.ops.dual_causal.triton_walks import forward_walk
from primal_attention.ops.launch import Config, Segments
from primal_attention.ops.triton_launch import count_strides, strides

__all__ = ["backward", "forward", "takes"]

PROGRAMS = 256  # under way at once: the longer their segments, the less these leave to add up


def forward(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    grams: bool,
    keep: bool,
    inverse_n: Tensor | None = None,  # [B]: what the sums after the last token are multiplied by
) -> tuple[Tensor, ...]:
    """Outputs, sums after the last token, Gram matrices, and the sums before each block."""
    (B, N, H, P), (_, S, V), where = q.shape, dims(q, h, c_e, c_r), key(q, h, c_e, c_r)
    config = FORWARD[where]
    segments, mask = launch.divide(q, config.block, PROGRAMS), launch.mask_bytes(token_mask)
    q, k, h = (launch.contiguous_rows(x) for x in (q, k, h))
    h_e, h_r = h.unbind(2)
    layout = N, H, segments.number, segments.tokens
    whole = is_whole(N, segments, config, map_q, map_k)
    totals = [launch.float32(q, B, H, P, P) if grams else None for _ in range(2)]
    sizes = _compiled_for(SUMS[where], q, P=P, S=S)
    sides = [
        _summed(z, rows, mask, start, total, layout, {**sizes, "FEATURE_MAP": name, "WHOLE": whole})
        for z, rows, start, total, name in (
            (q, h_e, q_before, totals[0], map_q),
            (k, h_r, k_before, totals[1], map_k),
        )
    ]
    before = running(*sides, number=segments.number, backward=False)
    out = q.new_empty(B, N, H, V)
    after = launch.float32(q, B, H, P, S), launch.float32(q, B, H, P, S)
    states = fused_states(q, h, config.block) if keep else None
    forward_walk[(B * segments.number * H,)](
        q, k, h_e, h_r, c_e, c_r, *launch.contiguous(bias), *before, counts, mask, inverse_n,
        out, *after, states,
        strides(q), strides(k), strides(h_e), _map_strides(c_e), _map_strides(c_r),
        count_strides(counts), strides(out), *layout, MAP_Q=map_q, MAP_K=map_k, WHOLE=whole,
        **_compiled_for(config, q, P=P, S=S, V=V),
    )  # fmt: skip
    optional = *totals, states
    return out, *after, *(launch.float32(q, 0) if x is None else x for x in optional)


def backward(q: Tensor, k: Tensor, h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the first eight inputs; the sums before the first token are part of states."""
    d_tokens = launch.empty_rows(q), launch.empty_rows(k), launch.empty_rows(h)
    return *d_tokens, *write_gradients(q, k, h, *(*rest, d_tokens, None))


def write_gradients(
    q: Tensor,
    k: Tensor,
    h: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    states: Tensor,
    d_out: Tensor,
    d_q_side: Tensor | None,
    d_k_side: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_tokens: tuple[Tensor, Tensor, Tensor],  # of q, k and h, with adjacent columns, written
    d_columns: Tensor | None,  # [2 H P + 2 H S]: their sums over all tokens, side by side, written
    inverse_n: Tensor | None = None,  # [B]: what d_q_side and d_k_side are multiplied by
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Write the gradients of the tokens; those of c_e, c_r, the bias and both sums come back.

    They are empty where these are not given.
    """
    (B, N, H, P), (_, S, V), where = q.shape, dims(q, h, c_e, c_r), key(q, h, c_e, c_r)
    config = BACKWARD[where]
    segments, mask = launch.divide(q, config.block, PROGRAMS), launch.mask_bytes(token_mask)
    q, k, h, d_out = (launch.contiguous_rows(x) for x in (q, k, h, d_out))
    h_e, h_r = h.unbind(2)
    layout = N, H, segments.number, segments.tokens
    whole = is_whole(N, segments, config, map_q, map_k)
    moments: list[Tensor | None] = [None, None]
    if segments.number > 1:
        room = B, segments.number, H, P, S
        moments = [None if c is None else launch.float32(q, *room) for c in (c_r, c_e)]
        segment_gradients[(B * segments.number * H,)](
            q, k, c_e, c_r, counts, mask, d_out, *moments,
            strides(q), strides(k), _map_strides(c_e), _map_strides(c_r), count_strides(counts),
            strides(d_out), *layout, MAP_Q=map_q, MAP_K=map_k, WHOLE=whole,
            **_compiled_for(SUMS[where], q, P=P, S=S, V=V),
        )  # fmt: skip
    sides = map(Side, (d_q_side, d_k_side), moments)
    d_after = running(*sides, number=segments.number, backward=True, inverse_n=inverse_n)
    left = inverse_n if segments.number == 1 else None  # else the running sums have it
    dq, dk, dh = d_tokens
    dh_e, dh_r = dh.unbind(2)
    programs = B * segments.number * H
    shapes = (S, V), (S, V), (V,)
    parts = [
        None if x is None else launch.float32(q, programs, *shape)
        for x, shape in zip((c_e, c_r, bias), shapes, strict=True)
    ]
    rows = B * segments.number, 2 * H * (P + S)
    columns = None if d_columns is None else launch.float32(q, *rows)
    befores = q_before, k_before
    d_before = [None if x is None else launch.float32(q, B, H, P, S) for x in befores]
    backward_walk[(4 * programs,)](
        q, k, h_e, h_r, c_e, c_r, counts, mask, left, states, d_out, *d_after,
        *launch.contiguous(d_gram_q, d_gram_k),
        dq, dk, dh_e, dh_r, columns, *parts, *d_before,
        strides(q), strides(k), strides(h_e), _map_strides(c_e), _map_strides(c_r),
        count_strides(counts), strides(d_out), strides(dq), strides(dk), strides(dh_e), *layout,
        SCORE_STAGES=score_stages(where, S), MAP_Q=map_q, MAP_K=map_k, WHOLE=whole,
        **_compiled_for(config, q, P=P, S=S, V=V),
    )  # fmt: skip
    given = zip((c_e, c_r, bias), shapes, strict=True)
    small = [q.new_empty(0) if x is None else x.new_empty(shape) for x, shape in given]
    add_up(*zip(parts, small, strict=True), (columns, d_columns))
    dc_e, dc_r, d_bias = small
    dq_before, dk_before = (launch.float32(q, 0) if d is None else d for d in d_before)
    return dc_e, dc_r, d_bias, dq_before, dk_before


def _summed(
    z: Tensor,
    h: Tensor,
    mask: Tensor | None,
    start: Tensor | None,
    gram: Tensor | None,
    layout: tuple[int, int, int, int],
    sizes: dict[str, Any],
) -> Side:
    """What each segment adds to the sum of a side, and to its Gram matrix where that is wanted.

    One alone adds its sum while it is walked over, and its Gram matrix is that of all tokens.
    """
    (_, H, number, _), alone = layout, layout[2] == 1
    room = len(z), number, H, sizes["P"]
    moments = None if alone else launch.float32(z, *room, sizes["S"])
    parts = gram if alone or gram is None else launch.float32(z, *room, sizes["P"])
    if not alone or gram is not None:
        segment_sums[(len(z) * number * H,)](
            z, h, mask, moments, parts, strides(z), strides(h), *layout, **sizes
        )
    return Side(start, moments, parts, gram)


def is_whole(N: int, segments: Segments, config: Config, *maps: str) -> bool:
    """Whether all blocks are, and the walks are made for that.

    Features of other maps are made in registers. With no condition to hold them back, the compiler
    would load nothing ahead, and the assembler of Triton 3.6 has products read anywhere.
    """
    return segments.whole(N, config.block) and {*maps} <= {"cosine", "identity"}


def _compiled_for(config: Config, q: Tensor, **sizes: int) -> dict[str, Any]:
    return {
        **sizes,
        **{f"WIDTH_{name}": launch.padded(size) for name, size in sizes.items()},
        "BLOCK": config.block,
        "PRECISION": launch.PRECISION[q.dtype],
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _map_strides(c: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if c is None else c.stride()
