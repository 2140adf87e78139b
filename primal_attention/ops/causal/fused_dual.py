"""The causal form of dual weights as fused passes: one walk forward, one backward.

The kernel values of a block serve both sides; scores and their means stay in registers. The forward
pass leaves the sums before each block, so that the backward pass needs no walk of its own to make
them again. README.md counts the work.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from primal_attention.ops.causal.fused_dual_walks import (
    backward_walk,
    forward_walk,
    running_sums,
    segment_gradients,
    segment_sums,
)
from primal_attention.ops.triton.launch import (
    PRECISION,
    Config,
    Segments,
    contiguous,
    contiguous_rows,
    count_strides,
    divide,
    float32,
    mask_bytes,
    padded,
    strides,
)
from primal_attention.ops.triton.sums import add_up

# By the largest padded width and the arithmetic of products. Both passes walk over the same blocks:
# the states that the forward pass leaves are those before each of them. With three stages the next
# block is read while one is worked on, where two programs of a multiprocessor have room for both.
FORWARD = {
    (32, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (64, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (128, "bf16"): Config(block=32, num_warps=8, num_stages=1),
    (32, "tf32"): Config(block=32, num_warps=4, num_stages=2),
    (64, "tf32"): Config(block=32, num_warps=8, num_stages=1),
    (32, "ieee"): Config(block=32, num_warps=4, num_stages=1),
    (64, "ieee"): Config(block=16, num_warps=8, num_stages=1),
}
BACKWARD = {
    **FORWARD,
    (32, "bf16"): Config(block=64, num_warps=4, num_stages=2),
    (64, "bf16"): Config(block=64, num_warps=4, num_stages=2),
}
SUMS = FORWARD  # of segments
_STATES = {torch.bfloat16: torch.bfloat16}  # as the products take them; else float32
PROGRAMS = 256  # under way at once: the longer their segments, the less these leave to add up
_ENTRIES = 2048  # of all segments, that a program has at once


class Dual(NamedTuple):
    """Tokens, output maps, and how features are made."""

    q: Tensor  # [B, N, H, P]
    k: Tensor
    h: Tensor  # [B, N, 2, H, S]: h_e and h_r
    c_e: Tensor | None  # [S, V]: the output map's part for e; None where e is not output
    c_r: Tensor | None
    bias: Tensor | None  # [V]
    counts: Tensor | None  # [B, N]: real tokens up to each; None where all are real
    token_mask: Tensor | None  # [B, N], True = real token
    map_q: str
    map_k: str

    @property
    def sizes(self) -> tuple[int, int, int]:
        """P, S and V."""
        c = self.c_r if self.c_e is None else self.c_e
        assert c is not None, "one of c_e and c_r must be given"
        return self.q.shape[-1], self.h.shape[-1], c.shape[-1]

    @property
    def key(self) -> tuple[int, str]:
        """Where the tables have the sizes for these tensors."""
        return key_of(self.q.dtype, *self.sizes)


class DualGradients(NamedTuple):
    """Gradients of what the walk forward gives, where there are any."""

    out: Tensor  # [B, N, H, V]
    q_side: Tensor | None  # [B, H, P, S]
    k_side: Tensor | None
    gram_q: Tensor | None  # [B, H, P, P]
    gram_k: Tensor | None


def key_of(dtype: torch.dtype, *widths: int) -> tuple[int, str]:
    """Return the key of the tables of sizes by the dtype of the queries, and P, S and V."""
    return max(padded(max(widths)), 32), PRECISION.get(dtype, "")


def score_stages(where: tuple[int, str], directions: int) -> int:
    """Return the stages of programs for scores: few directions leave room for one more."""
    more = where == (64, "bf16") and directions <= 32
    return BACKWARD[where].num_stages + more


def takes_sizes(dtype: torch.dtype, P: int, S: int, V: int, map_q: str, map_k: str) -> bool:
    """Return whether the walks support this dtype of the queries, these widths and these maps.

    The assembler of Triton 3.6 compiles the walks wrongly for heads in bfloat16 of more than 32 and
    less than 64 columns, and of 64 with some maps or with directions that are not aligned: products
    of them read anywhere.
    """
    where = key_of(dtype, P, S, V)
    if where != (64, "bf16"):
        return where in FORWARD
    maps = "relu" not in (map_q, map_k) and (map_q == "elu") == (map_k == "elu")
    return maps and P == V == 64 and S % 8 == 0


def kept_states(dtype: torch.dtype, P: int, S: int, V: int) -> tuple[int, torch.dtype]:
    """Tokens of a block, before each of which the sums are kept, and the dtype of these."""
    return FORWARD[key_of(dtype, P, S, V)].block, _STATES.get(dtype, torch.float32)


def walk_forward(
    given: Dual, *, grams: bool, keep: bool, inverse_n: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs, both sums after the last token times 1 / n [B], Gram matrices, and kept sums.

    The kept ones are those before each block, [B, blocks, H, 2, P, S]: of queries and of keys.
    """
    q, k, h = (contiguous_rows(x) for x in given[:3])
    (B, N, H, P), (_, S, V) = q.shape, given.sizes
    config = FORWARD[given.key]
    segments, mask = divide(q, config.block, PROGRAMS), mask_bytes(given.token_mask)
    h_e, h_r = h.unbind(2)
    layout = N, H, segments.number, segments.tokens
    whole = is_whole(N, segments, config, given.map_q, given.map_k)
    totals = [float32(q, B, H, P, P) if grams else None for _ in range(2)]
    sizes = _compiled_for(SUMS[given.key], q, P=P, S=S)
    sides = [
        _summed(z, rows, mask, total, layout, {**sizes, "FEATURE_MAP": name, "WHOLE": whole})
        for z, rows, total, name in (
            (q, h_e, totals[0], given.map_q),
            (k, h_r, totals[1], given.map_k),
        )
    ]
    before = running(*sides, number=segments.number, backward=False)
    out = q.new_empty(B, N, H, V)
    after = float32(q, B, H, P, S), float32(q, B, H, P, S)
    states = None
    if keep:
        block, dtype = kept_states(q.dtype, P, S, V)
        states = q.new_empty((B, -(-N // block), H, 2, P, S), dtype=dtype)
    forward_walk[(B * segments.number * H,)](
        q, k, h_e, h_r, given.c_e, given.c_r, *contiguous(given.bias), *before,
        given.counts, mask, inverse_n, out, *after, states,
        strides(q), strides(k), strides(h_e), _map_strides(given.c_e), _map_strides(given.c_r),
        count_strides(given.counts), strides(out), *layout,
        MAP_Q=given.map_q, MAP_K=given.map_k, WHOLE=whole,
        **_compiled_for(config, q, P=P, S=S, V=V),
    )  # fmt: skip
    gram_q, gram_k, kept = (float32(q, 0) if x is None else x for x in (*totals, states))
    return out, *after, gram_q, gram_k, kept


def walk_backward(
    given: Dual,
    states: Tensor,
    d: DualGradients,
    d_tokens: tuple[Tensor, Tensor, Tensor],  # of q, k and h, with adjacent columns, written
    d_columns: Tensor | None,  # [2 H P + 2 H S]: their sums over all tokens, side by side, written
    inverse_n: Tensor,  # [B]: what the sums after the last token were multiplied by
) -> list[Tensor | None]:
    """Write the gradients of the tokens; those of c_e, c_r and the bias come back."""
    q, k, h, d_out = (contiguous_rows(x) for x in (*given[:3], d.out))
    (B, N, H, P), (_, S, V) = q.shape, given.sizes
    c_e, c_r, counts = given.c_e, given.c_r, given.counts
    config = BACKWARD[given.key]
    segments, mask = divide(q, config.block, PROGRAMS), mask_bytes(given.token_mask)
    h_e, h_r = h.unbind(2)
    layout = N, H, segments.number, segments.tokens
    whole = is_whole(N, segments, config, given.map_q, given.map_k)
    options = {"MAP_Q": given.map_q, "MAP_K": given.map_k, "WHOLE": whole}
    moments: list[Tensor | None] = [None, None]
    if segments.number > 1:
        room = B, segments.number, H, P, S
        moments = [None if c is None else float32(q, *room) for c in (c_r, c_e)]
        segment_gradients[(B * segments.number * H,)](
            q, k, c_e, c_r, counts, mask, d_out, *moments,
            strides(q), strides(k), _map_strides(c_e), _map_strides(c_r), count_strides(counts),
            strides(d_out), *layout, **options,
            **_compiled_for(SUMS[given.key], q, P=P, S=S, V=V),
        )  # fmt: skip
    sides = map(Side, (d.q_side, d.k_side), moments)
    d_after = running(*sides, number=segments.number, backward=True, inverse_n=inverse_n)
    left = inverse_n if segments.number == 1 else None  # else the running sums have it
    dq, dk, dh = d_tokens
    dh_e, dh_r = dh.unbind(2)
    programs = B * segments.number * H
    shapes = (S, V), (S, V), (V,)
    small = c_e, c_r, given.bias
    parts = [
        None if x is None else float32(q, programs, *shape)
        for x, shape in zip(small, shapes, strict=True)
    ]
    rows = B * segments.number, 2 * H * (P + S)
    columns = None if d_columns is None else float32(q, *rows)
    backward_walk[(4 * programs,)](
        q, k, h_e, h_r, c_e, c_r, counts, mask, left, states, d_out, *d_after,
        *contiguous(d.gram_q, d.gram_k),
        dq, dk, dh_e, dh_r, columns, *parts,
        strides(q), strides(k), strides(h_e), _map_strides(c_e), _map_strides(c_r),
        count_strides(counts), strides(d_out), strides(dq), strides(dk), strides(dh_e), *layout,
        SCORE_STAGES=score_stages(given.key, S), **options,
        **_compiled_for(config, q, P=P, S=S, V=V),
    )  # fmt: skip
    d_small = [None if x is None else x.new_empty(x.shape) for x in small]
    add_up(*zip(parts, d_small, strict=True), (columns, d_columns))
    return d_small


def _summed(
    z: Tensor,
    h: Tensor,
    mask: Tensor | None,
    gram: Tensor | None,
    layout: tuple[int, int, int, int],
    sizes: dict[str, Any],
) -> Side:
    """Sum each segment of a side, and its Gram matrix where that is wanted.

    A single segment is summed while it is walked over; its Gram matrix is that of all tokens.
    """
    (_, H, number, _), alone = layout, layout[2] == 1
    room = len(z), number, H, sizes["P"]
    moments = None if alone else float32(z, *room, sizes["S"])
    parts = gram if alone or gram is None else float32(z, *room, sizes["P"])
    if not alone or gram is not None:
        segment_sums[(len(z) * number * H,)](
            z, h, mask, moments, parts, strides(z), strides(h), *layout, **sizes
        )
    return Side(None, moments, parts, gram)


def is_whole(N: int, segments: Segments, config: Config, *maps: str) -> bool:
    """Return whether all blocks are full and the walks for these maps need no condition.

    Features of other maps are made in registers. With no condition to hold them back, the compiler
    would load nothing ahead, and the assembler of Triton 3.6 has products read anywhere.
    """
    return segments.whole(N, config.block) and {*maps} <= {"cosine", "identity"}


def _compiled_for(config: Config, q: Tensor, **sizes: int) -> dict[str, Any]:
    return {
        **sizes,
        **{f"WIDTH_{name}": padded(size) for name, size in sizes.items()},
        "BLOCK": config.block,
        "PRECISION": PRECISION[q.dtype],
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _map_strides(c: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if c is None else c.stride()


class Side(NamedTuple):
    """Sums of a side: where they start, and the part of each segment."""

    start: Tensor | None  # [B, H, P, S]
    moments: Tensor | None  # [B, segments, H, P, S]
    parts: Tensor | None = None  # [B, segments, H, P, P]: of its Gram matrix
    gram: Tensor | None = None  # [B, H, P, P]: their sum, written


def running(
    *sides: Side, number: int, backward: bool, inverse_n: Tensor | None = None
) -> list[Tensor | None]:
    """Add up for each side its start and all segments before each, [B, segments, H, P, S].

    With backward, add up all segments behind each; the start counts inverse_n times, [B]. None
    where that is zero; for one segment the start itself, [B, H, P, S].
    """
    if number == 1:
        return [None if side.start is None else side.start.contiguous() for side in sides]
    sides = tuple(Side(*(None if x is None else x.contiguous() for x in side)) for side in sides)
    results = [_room(side, number) for side in sides]
    shown = next((x for x in results if x is not None), None)
    if shown is not None:
        B, _, *rest = shown.shape
        size, height = torch.Size(rest).numel(), triton.next_power_of_2(number)
        gram_size = max(0 if side.gram is None else side.gram[0].numel() for side in sides)
        width = max(16, _ENTRIES // height)
        given = [
            x
            for (start, moments, *grams), result in zip(sides, results, strict=True)
            for x in (start, moments, result, *grams)
        ]
        running_sums[(B, -(-max(size, gram_size) // width), 2)](
            *given, inverse_n, number, size, gram_size, height, width, backward
        )
    return results


def _room(side: Side, number: int) -> Tensor | None:
    start, moments, *_ = side
    if moments is not None:
        return torch.empty_like(moments)
    return None if start is None else start.new_empty((len(start), number, *start.shape[1:]))
