"""The causal form of dual weights as fused passes: one walk forward, one backward.

The kernel values of a block serve both sides; scores and their means stay in registers. The forward
pass leaves the sums before each block, so that the backward pass needs no walk of its own to make
them again. README.md counts the work.

Both sides are one formula with queries and keys, e and r exchanged: what is said of a near side and
a far one holds both ways. Programs that share their tokens have neighbouring numbers, so that what
one reads the others find in the cache.

Features are factor * base: for the cosine map the base is the rows as they lie in memory, which
thus go into the products without passing through registers.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head, n tokens of a
block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import PRECISION, launched, padded

# By the largest padded width and the arithmetic of products. Both passes walk over the same blocks:
# the states that the forward pass leaves are those before each of them. With three stages the next
# block is read while one is worked on, where two programs of a multiprocessor have room for both.
FORWARD = {
    (32, "bf16"): launch.Config(block=64, num_warps=4, num_stages=3),
    (64, "bf16"): launch.Config(block=64, num_warps=4, num_stages=3),
    (128, "bf16"): launch.Config(block=32, num_warps=8, num_stages=1),
    (32, "tf32"): launch.Config(block=32, num_warps=4, num_stages=2),
    (64, "tf32"): launch.Config(block=32, num_warps=8, num_stages=1),
    (32, "ieee"): launch.Config(block=32, num_warps=4, num_stages=1),
    (64, "ieee"): launch.Config(block=16, num_warps=8, num_stages=1),
}
BACKWARD = {
    **FORWARD,
    (32, "bf16"): launch.Config(block=64, num_warps=4, num_stages=2),
    (64, "bf16"): launch.Config(block=64, num_warps=4, num_stages=2),
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
    q, k, h = (launch.contiguous_rows(x) for x in given[:3])
    (B, N, H, P), (_, S, V) = q.shape, given.sizes
    config = FORWARD[given.key]
    segments, mask = launch.divide(q, config.block, PROGRAMS), launch.mask_bytes(given.token_mask)
    h_e, h_r = h.unbind(2)
    layout = N, H, segments.number, segments.tokens
    whole = is_whole(N, segments, config, given.map_q, given.map_k)
    totals = [launch.float32(q, B, H, P, P) if grams else None for _ in range(2)]
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
    after = launch.float32(q, B, H, P, S), launch.float32(q, B, H, P, S)
    states = None
    if keep:
        block, dtype = kept_states(q.dtype, P, S, V)
        states = q.new_empty((B, -(-N // block), H, 2, P, S), dtype=dtype)
    forward_walk[(B * segments.number * H,)](
        q, k, h_e, h_r, given.c_e, given.c_r, *launch.contiguous(given.bias), *before,
        given.counts, mask, inverse_n, out, *after, states,
        *map(launch.strides, (q, k, h_e)),
        *map(launch.matrix_strides, (given.c_e, given.c_r, given.counts)),
        launch.strides(out), *layout,
        MAP_Q=given.map_q, MAP_K=given.map_k, WHOLE=whole,
        **_compiled_for(config, q, P=P, S=S, V=V),
    )  # fmt: skip
    gram_q, gram_k, kept = (launch.float32(q, 0) if x is None else x for x in (*totals, states))
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
    q, k, h, d_out = (launch.contiguous_rows(x) for x in (*given[:3], d.out))
    (B, N, H, P), (_, S, V) = q.shape, given.sizes
    c_e, c_r, counts = given.c_e, given.c_r, given.counts
    config = BACKWARD[given.key]
    segments, mask = launch.divide(q, config.block, PROGRAMS), launch.mask_bytes(given.token_mask)
    h_e, h_r = h.unbind(2)
    layout = N, H, segments.number, segments.tokens
    whole = is_whole(N, segments, config, given.map_q, given.map_k)
    options = {"MAP_Q": given.map_q, "MAP_K": given.map_k, "WHOLE": whole}
    moments: list[Tensor | None] = [None, None]
    if segments.number > 1:
        room = B, segments.number, H, P, S
        moments = [None if c is None else launch.float32(q, *room) for c in (c_r, c_e)]
        segment_gradients[(B * segments.number * H,)](
            q, k, c_e, c_r, counts, mask, d_out, *moments,
            launch.strides(q), launch.strides(k), *map(launch.matrix_strides, (c_e, c_r, counts)),
            launch.strides(d_out), *layout, **options,
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
        None if x is None else launch.float32(q, programs, *shape)
        for x, shape in zip(small, shapes, strict=True)
    ]
    rows = B * segments.number, 2 * H * (P + S)
    columns = None if d_columns is None else launch.float32(q, *rows)
    backward_walk[(4 * programs,)](
        q, k, h_e, h_r, c_e, c_r, counts, mask, left, states, d_out, *d_after,
        *launch.contiguous(d.gram_q, d.gram_k),
        dq, dk, dh_e, dh_r, columns, *parts,
        *map(launch.strides, (q, k, h_e)), *map(launch.matrix_strides, (c_e, c_r, counts)),
        *map(launch.strides, (d_out, dq, dk, dh_e)), *layout,
        SCORE_STAGES=score_stages(given.key, S), **options,
        **_compiled_for(config, q, P=P, S=S, V=V),
    )  # fmt: skip
    d_small = [None if x is None else x.new_empty(x.shape) for x in small]
    launch.add_up(*zip(parts, d_small, strict=True), (columns, d_columns))
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
    moments = None if alone else launch.float32(z, *room, sizes["S"])
    parts = gram if alone or gram is None else launch.float32(z, *room, sizes["P"])
    if not alone or gram is not None:
        segment_sums[(len(z) * number * H,)](
            z, h, mask, moments, parts, launch.strides(z), launch.strides(h), *layout, **sizes
        )
    return Side(None, moments, parts, gram)


def is_whole(N: int, segments: launch.Segments, config: launch.Config, *maps: str) -> bool:
    """Return whether all blocks are full and the walks for these maps need no condition.

    Features of other maps are made in registers. With no condition to hold them back, the compiler
    would load nothing ahead, and the assembler of Triton 3.6 has products read anywhere.
    """
    return segments.whole(N, config.block) and {*maps} <= {"cosine", "identity"}


def _compiled_for(config: launch.Config, q: Tensor, **sizes: int) -> dict[str, Any]:
    return {
        **sizes,
        **{f"WIDTH_{name}": padded(size) for name, size in sizes.items()},
        "BLOCK": config.block,
        "PRECISION": PRECISION[q.dtype],
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


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


@triton.jit
def map_of(
    side_map,
    S: tl.constexpr, V: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Load the map [S, V] of a side as an operand; zeros where the side is not output."""
    c, strides = side_map
    matrix = tl.zeros([WIDTH_S, WIDTH_V], tl.float32)
    if c is not None:
        s, v = tl.arange(0, WIDTH_S), tl.arange(0, WIDTH_V)
        places = c + s[:, None] * strides[0] + v[None, :] * strides[1]
        matrix += tl.load(places, mask=(s < S)[:, None] & (v < V)[None, :], other=0.0)
    return tt.lowered(matrix, PRECISION)


@triton.jit
def inverse_of(inverse_n, b):
    """1 / n of a sequence; 1 where none are given."""
    value = tl.full([], 1.0, tl.float32)
    if inverse_n is not None:
        value = tl.load(inverse_n + b)
    return value


@triton.jit
def state_of(
    states, number,
    P: tl.constexpr, S: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr,
):  # fmt: skip
    """Load one of the contiguous matrices [., P, S] as it was kept."""
    p, s = tl.arange(0, WIDTH_P), tl.arange(0, WIDTH_S)
    places = states + tl.cast(number, tl.int64) * (P * S) + (p[:, None] * S + s[None, :])
    return tl.load(places, mask=(p < P)[:, None] & (s < S)[None, :], other=0.0)


@triton.jit
def past(matrix):
    """Zeros where a token [row] meets a later one [column]."""
    n = tl.arange(0, matrix.shape[0])
    return tl.where(n[:, None] >= n[None, :], matrix, 0.0)


@triton.jit
def later(matrix):
    """Zeros where a token [row] meets an earlier one [column]."""
    n = tl.arange(0, matrix.shape[0])
    return tl.where(n[:, None] <= n[None, :], matrix, 0.0)


@triton.jit
def both_ways(d_gram, number, P: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """DG + dG^T of one head; zeros where there is none."""
    matrix = tt.load_stacked(d_gram, number, P, P, WIDTH, WIDTH)
    return tt.lowered(matrix + tl.trans(matrix), PRECISION)


@triton.jit
def read_from(base, far, far_factor, far_rows, far_side, PRECISION: tl.constexpr):
    """Read the far side for the near one, [n, S], without the factors of the near features."""
    kernel_matrix = tt.times(base, tl.trans(far), PRECISION) * far_factor[None, :]
    read = tt.times(base, far_side, PRECISION)
    return tt.lowered_product(past(kernel_matrix), far_rows, read, PRECISION)


@launched()
def segment_sums(
    z, h, mask, moments, gram, strides, h_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FEATURE_MAP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum phi h^T and the Gram matrix over each segment, where they are wanted.

    It ends where the walk forward begins, which finds in the cache what was read last.
    """
    program = tl.program_id(0)
    b, head, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z, h = (
        tt.segment_of((z, strides), b, head, first),
        tt.segment_of((h, h_strides), b, head, first),
    )
    sum_h = tl.zeros([WIDTH_P, WIDTH_S], tl.float32)
    sum_phi = tl.zeros([WIDTH_P, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = tt.walk(0, last - first, step, BLOCK, True)
        real = tt.real_tokens(mask, b, N, first + row, end, BLOCK)
        base, factor, _ = tt.features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        # Gram matrices come last: in the other order the assembler of Triton 3.6 has the second
        # product read where a register points that nothing was written to.
        if moments is not None:
            rows = tt.rows_of(h, row, real, S, WIDTH_S, BLOCK, PRECISION)
            sum_h = tt.lowered_product(tl.trans(base), tt.scaled(rows, factor), sum_h, PRECISION)
        if gram is not None:
            sum_phi = tt.lowered_product(
                tl.trans(base), tt.scaled(base, factor * factor), sum_phi, PRECISION
            )
    if moments is not None:
        tt.store_stacked(moments, program, sum_h, P, S)
    if gram is not None:
        tt.store_stacked(gram, program, sum_phi, P, P)


@launched()
def segment_gradients(
    q, k, c_e, c_r, counts, mask, d_out, dq_moments, dk_moments,
    q_strides, k_strides, c_e_strides, c_r_strides, count_strides, d_out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum over each segment but the first its gradients of the sums before it.

    With u = 1 / n the maps are applied last: phi^T (u d_out C^T) = (phi^T u d_out) C^T. It ends
    where the walk backward begins.
    """
    program = tl.program_id(0)
    b, h, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    last = tl.where(first == 0, 0, last)
    end = None if WHOLE else last
    q, k = tt.segment_of((q, q_strides), b, h, first), tt.segment_of((k, k_strides), b, h, first)
    d_out = tt.segment_of((d_out, d_out_strides), b, h, first)
    sum_q = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    sum_k = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = tt.walk(0, last - first, step, BLOCK, False)
        start = first + row
        real = tt.real_tokens(mask, b, N, start, end, BLOCK)
        share = tt.shares(counts, count_strides, b, start, end, BLOCK)
        dy = tt.rows_of(d_out, row, real, V, WIDTH_V, BLOCK, PRECISION)
        if c_e is not None:
            z_q, f_q, _ = tt.features_of(
                q, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_Q
            )  # fmt: skip
            sum_q = tt.lowered_product(tl.trans(z_q), tt.scaled(dy, f_q * share), sum_q, PRECISION)
        if c_r is not None:
            z_k, f_k, _ = tt.features_of(
                k, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_K
            )  # fmt: skip
            sum_k = tt.lowered_product(tl.trans(z_k), tt.scaled(dy, f_k * share), sum_k, PRECISION)
    if c_e is not None:
        map_e = map_of((c_e, c_e_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
        tt.store_stacked(dk_moments, program, tt.times(sum_q, tl.trans(map_e), PRECISION), P, S)
    if c_r is not None:
        map_r = map_of((c_r, c_r_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
        tt.store_stacked(dq_moments, program, tt.times(sum_k, tl.trans(map_r), PRECISION), P, S)


@launched("number", "size", "gram_size")
def running_sums(
    start_0, moments_0, result_0, parts_0, gram_0, start_1, moments_1, result_1, parts_1, gram_1,
    inverse_n, number, size, gram_size,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Some entries of all segments of one sequence: sums before each, the Gram matrix of all."""
    if tl.program_id(2) == 0:
        _running_side(
            start_0, moments_0, result_0, inverse_n, number, size, HEIGHT, WIDTH, BACKWARD
        )  # fmt: skip
        _added_side(parts_0, gram_0, number, gram_size, HEIGHT, WIDTH)
    else:
        _running_side(
            start_1, moments_1, result_1, inverse_n, number, size, HEIGHT, WIDTH, BACKWARD
        )  # fmt: skip
        _added_side(parts_1, gram_1, number, gram_size, HEIGHT, WIDTH)


@triton.jit
def _entries(number, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Sequence, segments and entries of a program; where they lie in [B, number, size], and if."""
    b = tl.program_id(0).to(tl.int64)
    place, segment = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, HEIGHT)
    exists = (segment < number)[:, None] & (place < size)[None, :]
    return b, segment, place, (b * number + segment)[:, None] * size + place[None, :], exists


@triton.jit
def _running_side(
    start, moments, result, inverse_n, number, size,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    if result is not None:
        b, segment, place, offsets, exists = _entries(number, size, HEIGHT, WIDTH)
        sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
        if moments is not None:  # those of the neighbour, which the sum has grown by
            ends = segment == number - 1 if BACKWARD else segment == 0
            shift = size if BACKWARD else -size
            sums += tl.load(moments + offsets + shift, mask=exists & ~ends[:, None], other=0.0)
            sums = tl.cumsum(sums, 0, reverse=BACKWARD)
        if start is not None:
            begin = tl.load(start + b * size + place, mask=place < size, other=0.0)
            sums += (begin * inverse_of(inverse_n, b))[None, :]
        tl.store(result + offsets, sums, mask=exists)


@triton.jit
def _added_side(parts, gram, number, size, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    if parts is not None:
        b, _, place, offsets, exists = _entries(number, size, HEIGHT, WIDTH)
        total = tl.sum(tl.load(parts + offsets, mask=exists, other=0.0), 0)
        tl.store(gram + b * size + place, total, mask=place < size)


@launched()
def forward_walk(
    q, k, h_e, h_r, c_e, c_r, bias, q_before, k_before, counts, mask, inverse_n,
    out, q_after, k_after, states,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides, out_strides,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out = e C_e + r C_r + bias, and the sums of both sides, the last times inverse_n."""
    program = tl.program_id(0)
    b, h, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    q, k = tt.segment_of((q, q_strides), b, h, first), tt.segment_of((k, k_strides), b, h, first)
    h_e, h_r = (
        tt.segment_of((h_e, h_strides), b, h, first),
        tt.segment_of((h_r, h_strides), b, h, first),
    )
    out = tt.segment_of((out, out_strides), b, h, first)
    map_e = map_of((c_e, c_e_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
    map_r = map_of((c_r, c_r_strides), S, V, WIDTH_S, WIDTH_V, PRECISION)
    shift = tt.row_of(bias, 0, V, WIDTH_V)
    q_side = tt.load_stacked(q_before, program, P, S, WIDTH_P, WIDTH_S)
    k_side = tt.load_stacked(k_before, program, P, S, WIDTH_P, WIDTH_S)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = tt.walk(0, last - first, step, BLOCK, False)
        start = first + row
        real = tt.real_tokens(mask, b, N, start, end, BLOCK)
        share = tt.shares(counts, count_strides, b, start, end, BLOCK)
        z_q, f_q, _ = tt.features_of(
            q, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_Q
        )  # fmt: skip
        z_k, f_k, _ = tt.features_of(
            k, row, real, P, WIDTH_P, BLOCK, PRECISION, MAP_K
        )  # fmt: skip
        rows_e = tt.rows_of(h_e, row, real, S, WIDTH_S, BLOCK, PRECISION)
        rows_r = tt.rows_of(h_r, row, real, S, WIDTH_S, BLOCK, PRECISION)
        if states is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + h) * 2
            tt.store_stacked(states, place, q_side, P, S)
            tt.store_stacked(states, place + 1, k_side, P, S)
        y = tl.zeros([BLOCK, WIDTH_V], tl.float32) + shift[None, :]
        if c_e is not None:
            e = read_from(z_q, z_k, f_k, rows_r, k_side, PRECISION)
            y = tt.lowered_product(tt.scaled(e, f_q * share), map_e, y, PRECISION)
        if c_r is not None:
            r = read_from(z_k, z_q, f_q, rows_e, q_side, PRECISION)
            y = tt.lowered_product(tt.scaled(r, f_k * share), map_r, y, PRECISION)
        if mask is not None:
            y = tl.where(real[:, None], y, 0.0)
        exists = tt.columns_of(tt.existing(start, end, BLOCK), V, WIDTH_V)
        tt.store_segment_rows(out, y, row, exists)
        q_side = tt.lowered_product(tl.trans(z_q), tt.scaled(rows_e, f_q), q_side, PRECISION)
        k_side = tt.lowered_product(tl.trans(z_k), tt.scaled(rows_r, f_k), k_side, PRECISION)
    if last == N:
        share_of_one = inverse_of(inverse_n, b)
        tt.store_stacked(q_after, b * H + h, q_side * share_of_one, P, S)
        tt.store_stacked(k_after, b * H + h, k_side * share_of_one, P, S)


@launched()
def backward_walk(
    q, k, h_e, h_r, c_e, c_r, counts, mask, inverse_n, states, d_out, dq_after, dk_after,
    d_gram_q, d_gram_k, dq, dk, dh_e, dh_r, columns, dc_e, dc_r, d_bias,
    q_strides, k_strides, h_strides, c_e_strides, c_r_strides, count_strides,
    d_out_strides, dq_strides, dk_strides, dh_strides, N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    SCORE_STAGES: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute all gradients: of every four programs two take features of a side, two its scores.

    What comes from behind a segment counts inverse_n times, where that is given. The sums over the
    tokens of a segment, of dq, dk, dh_e and dh_r side by side, go to a row of columns, where there
    are any.
    """
    program, kind = tl.program_id(0) // 4, tl.program_id(0) % 4
    column = (program // H).to(tl.int64) * (2 * H * (P + S))  # where the row begins
    of_q, of_h = column + program % H * P, column + 2 * H * P + program % H * S
    q, k, d_out = (q, q_strides), (k, k_strides), (d_out, d_out_strides)
    h_e, h_r, c_e, c_r = (h_e, h_strides), (h_r, h_strides), (c_e, c_e_strides), (c_r, c_r_strides)
    known = counts, count_strides, mask, inverse_n, states
    if kind == 0:
        _backward_features(
            program, q, k, h_e, h_r, c_e, c_r, known, d_out, dq_after, d_gram_q,
            (dq, dq_strides), columns, of_q, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_Q, MAP_K, 1, WHOLE,
        )  # fmt: skip
    elif kind == 1:
        _backward_features(
            program, k, q, h_r, h_e, c_r, c_e, known, d_out, dk_after, d_gram_k,
            (dk, dk_strides), columns, of_q + H * P, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, STAGES, MAP_K, MAP_Q, 0, WHOLE,
        )  # fmt: skip
    elif kind == 2:
        _backward_scores(
            program, q, k, h_r, c_e, c_r, known, d_out, dq_after,
            (dh_e, dh_strides), dc_e, d_bias, columns, of_h, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, SCORE_STAGES,
            MAP_Q, MAP_K, 1, WHOLE,
        )  # fmt: skip
    else:
        _backward_scores(
            program, k, q, h_e, c_r, c_e, known, d_out, dk_after,
            (dh_r, dh_strides), dc_r, None, columns, of_h + H * S, N, H, number, tokens,
            P, S, V, WIDTH_P, WIDTH_S, WIDTH_V, BLOCK, PRECISION, SCORE_STAGES,
            MAP_K, MAP_Q, 0, WHOLE,
        )  # fmt: skip


@triton.jit
def _backward_features(
    program, z, far_z, h, far_h, c, far_c, known, d_out, d_after, d_gram, dz, columns, column,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows behind the near side's features."""
    counts, count_strides, mask, inverse_n, states = known
    b, head, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    end = None if WHOLE else last
    z = tt.segment_of(z, b, head, first)
    far_z = tt.segment_of(far_z, b, head, first)
    h, far_h = tt.segment_of(h, b, head, first), tt.segment_of(far_h, b, head, first)
    dz = tt.segment_of(dz, b, head, first)
    d_out = tt.segment_of(d_out, b, head, first)
    near_map = map_of(c, S, V, WIDTH_S, WIDTH_V, PRECISION)
    far_map = map_of(far_c, S, V, WIDTH_S, WIDTH_V, PRECISION)
    both = both_ways(d_gram, b * H + head, P, WIDTH_P, PRECISION)
    d_side = tt.load_stacked(d_after, program, P, S, WIDTH_P, WIDTH_S) * inverse_of(inverse_n, b)
    sums = tl.zeros([BLOCK // 2, WIDTH_P], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = tt.walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = tt.real_tokens(mask, b, N, start, end, BLOCK)
        share = tt.shares(counts, count_strides, b, start, end, BLOCK)
        dy = tt.rows_of(d_out, row, real, V, WIDTH_V, BLOCK, PRECISION)
        rows = tt.rows_of(h, row, real, S, WIDTH_S, BLOCK, PRECISION)
        base, factor, inverse = tt.features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        far, far_factor, _ = tt.features_of(
            far_z, row, real, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
        )  # fmt: skip
        d_phi = tl.zeros([BLOCK, WIDTH_P], tl.float32)
        if d_gram is not None:
            d_phi = tt.scaled(tt.times(base, both, PRECISION), factor)
        d_phi = tt.lowered_product(rows, tl.trans(d_side), d_phi, PRECISION)
        d_kernel = tl.zeros([BLOCK, BLOCK], tl.float32)
        if c[0] is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + head) * 2 + FAR_SIDE
            far_side = state_of(states, place, P, S, WIDTH_P, WIDTH_S)
            far_rows = tt.rows_of(far_h, row, real, S, WIDTH_S, BLOCK, PRECISION)
            d_read = tt.scaled(tt.times(dy, tl.trans(near_map), PRECISION), share)
            d_phi = tt.lowered_product(d_read, tl.trans(far_side), d_phi, PRECISION)
            d_kernel = tt.times(d_read, tl.trans(far_rows), PRECISION) * far_factor[None, :]
            d_kernel = past(d_kernel)
        if far_c[0] is not None:
            d_far = tt.scaled(tt.times(dy, tl.trans(far_map), PRECISION), far_factor * share)
            d_far = tt.lowered(d_far, PRECISION)
            d_kernel += later(tt.times(rows, tl.trans(d_far), PRECISION))
            d_side = tt.lowered_product(tl.trans(far), d_far, d_side, PRECISION)
        d_phi = tt.lowered_product(d_kernel, far, d_phi, PRECISION)
        d_rows = tt.pull_back(base, factor, inverse, d_phi, FEATURE_MAP)
        exists = tt.columns_of(tt.existing(start, end, BLOCK), P, WIDTH_P)
        tt.store_segment_rows(dz, d_rows, row, exists)
        if columns is not None:
            sums += tt.by_eight(d_rows)
    if columns is not None:
        tt.store_row(columns + column, 0, tl.sum(sums, 0), P, WIDTH_P)


@triton.jit
def _backward_scores(
    program, z, far_z, far_h, c, far_c, known, d_out, d_after, dh, dc, d_bias, columns, column,
    N, H, number, tokens,
    P: tl.constexpr, S: tl.constexpr, V: tl.constexpr,
    WIDTH_P: tl.constexpr, WIDTH_S: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    FEATURE_MAP: tl.constexpr, FAR_MAP: tl.constexpr, FAR_SIDE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradients of the near side's dual variables, of the map of its scores, and of the bias."""
    counts, count_strides, mask, inverse_n, states = known
    b, head, first, last = tt.share_of_tokens(program, N, H, number, tokens)
    dh = tt.segment_of(dh, b, head, first)
    end = None if WHOLE else last
    z = tt.segment_of(z, b, head, first)
    far_z = tt.segment_of(far_z, b, head, first)
    far_h = tt.segment_of(far_h, b, head, first)
    d_out = tt.segment_of(d_out, b, head, first)
    far_map = map_of(far_c, S, V, WIDTH_S, WIDTH_V, PRECISION)
    d_side = tt.load_stacked(d_after, program, P, S, WIDTH_P, WIDTH_S) * inverse_of(inverse_n, b)
    sum_c = tl.zeros([WIDTH_V, WIDTH_S], tl.float32)
    sum_bias = tl.zeros([16, WIDTH_V], tl.float32)
    sums = tl.zeros([BLOCK // 2, WIDTH_S], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        row = tt.walk(0, last - first, step, BLOCK, True)
        start = first + row
        real = tt.real_tokens(mask, b, N, start, end, BLOCK)
        share = tt.shares(counts, count_strides, b, start, end, BLOCK)
        dy = tt.rows_of(d_out, row, real, V, WIDTH_V, BLOCK, PRECISION)
        base, factor, _ = tt.features_of(
            z, row, real, P, WIDTH_P, BLOCK, PRECISION, FEATURE_MAP
        )  # fmt: skip
        far, far_factor, _ = tt.features_of(
            far_z, row, real, P, WIDTH_P, BLOCK, PRECISION, FAR_MAP
        )  # fmt: skip
        dh_rows = tt.times(base, d_side, PRECISION)
        kernel_matrix = tt.times(base, tl.trans(far), PRECISION)
        if far_c[0] is not None:
            d_far = tt.scaled(tt.times(dy, tl.trans(far_map), PRECISION), far_factor * share)
            d_far = tt.lowered(d_far, PRECISION)
            dh_rows = tt.lowered_product(later(kernel_matrix), d_far, dh_rows, PRECISION)
            d_side = tt.lowered_product(tl.trans(far), d_far, d_side, PRECISION)
        exists = tt.columns_of(tt.existing(start, end, BLOCK), S, WIDTH_S)
        dh_rows = tt.scaled(dh_rows, factor)
        tt.store_segment_rows(dh, dh_rows, row, exists)
        if columns is not None:
            sums += tt.by_eight(dh_rows)
        if c[0] is not None:
            place = ((b * tl.cdiv(N, BLOCK) + start // BLOCK) * H + head) * 2 + FAR_SIDE
            far_side = state_of(states, place, P, S, WIDTH_P, WIDTH_S)
            far_rows = tt.rows_of(far_h, row, real, S, WIDTH_S, BLOCK, PRECISION)
            read = tt.times(base, far_side, PRECISION)
            kernel_matrix = past(kernel_matrix * far_factor[None, :])
            read = tt.lowered_product(kernel_matrix, far_rows, read, PRECISION)
            sum_c = tt.lowered_product(
                tl.trans(dy), tt.scaled(read, factor * share), sum_c, PRECISION
            )
        if d_bias is not None:
            groups = tl.reshape(dy.to(tl.float32), [BLOCK // 16, 16, WIDTH_V])
            sum_bias += tl.sum(groups, 0)
    if columns is not None:
        tt.store_row(columns + column, 0, tl.sum(sums, 0), S, WIDTH_S)
    if c[0] is not None:
        tt.store_stacked(dc, program, tl.trans(sum_c), S, V)
    if d_bias is not None:
        tt.store_row(d_bias, program, tl.sum(sum_bias, 0), V, WIDTH_V)
