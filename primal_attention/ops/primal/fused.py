"""Phi A + b and Gram matrices as fused passes: queries and keys are read once.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, n tokens of a block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.primal import fused_moment
from primal_attention.ops.primal.eager import Attended, MomentInputs, collapsed_eager
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import (
    DOTS,
    Config,
    Descriptor,
    Shares,
    launched,
    padded,
    summed,
)

# By the larger padded dim of a head.
FORWARD = {
    torch.bfloat16: fused_moment.HALF,
    torch.float16: fused_moment.HALF,
    torch.float32: {
        16: Config(block=64, tile=16, num_warps=4, num_stages=2),
        32: Config(block=32, tile=32, num_warps=4, num_stages=2),
        64: Config(block=32, tile=32, num_warps=4, num_stages=2),
        128: Config(block=16, tile=32, num_warps=8, num_stages=1),
        256: Config(block=16, tile=16, num_warps=8, num_stages=1),
    },
}
# Where all gradients fit one pass; wider heads take a pass for each. A share is two programs, one
# for each side: at 64 columns a multiprocessor has room for three.
_HALF = {
    16: fused_moment.HALF[16],
    32: fused_moment.HALF[32],
    64: fused_moment.HALF[64]._replace(programs=198),
}
_FULL = {width: Config(block=32, num_warps=4, num_stages=2) for width in (16, 32)}
BACKWARD = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: _FULL}
# By the width, with which a multiprocessor has room for as many that take several sequences.
RUN_REGISTERS = {64: {"maxnreg": 168}}


class PrimalOp(FusedOp):
    """Outputs and Gram matrices, from matrices A_e and A_r."""

    name = "primal"
    inputs = Attended
    differentiable = ("q", "k", "a_e", "a_r", "bias")
    outputs = ("out", "gram_q", "gram_k")
    num_outputs = first_kept = 3

    def supports(self, given: Attended) -> bool:
        """Return whether the passes take these dtypes, sizes and maps."""
        q, k = given.q, given.k
        maps = tt.has_maps(given.map_q, given.map_k)
        same = q.dtype == k.dtype and q.shape == k.shape
        return maps and same and q.dtype in DOTS and width_of(given) <= 256

    def forward(self, given: Attended, *, keep: bool) -> Sequence[Tensor]:
        """Compute outputs and both Gram matrices."""
        return attend(given, grams=True)

    def empty(self, given: Attended) -> Sequence[Tensor]:
        """Allocate the same."""
        q, (B, N, H, P) = given.q, given.q.shape
        grams = (q.new_empty((B, H, P, P), dtype=torch.float32) for _ in range(2))
        return q.new_empty((B, N, H, given.columns)), *grams

    def backward(self, given: Attended, call: Backward) -> dict[str, Tensor]:
        """Compute gradients of the tensors."""
        into = InputGradients(*(None if x is None else torch.empty_like(x) for x in given[:5]))
        write_gradients(given, OutputGradients(*call.grads), into)
        return {name: d for name, d in into._asdict().items() if d is not None}

    def eager(self, given: Attended) -> Sequence[Tensor]:
        """Compute the outputs in plain PyTorch."""
        return collapsed_eager(given)


class OutputGradients(NamedTuple):
    """Gradients of what the pass gives, where there are any."""

    out: Tensor | None  # [B, N, H, C]
    gram_q: Tensor | None  # [B, H, P, P]
    gram_k: Tensor | None


class InputGradients(NamedTuple):
    """Where gradients are written; None where they are not wanted."""

    q: Tensor | None
    k: Tensor | None
    a_e: Tensor | None
    a_r: Tensor | None
    bias: Tensor | None


class ByCounts(NamedTuple):
    """Divisors of gradients: the number of real tokens up to each."""

    counts: Tensor | None  # [B, N]; None where all tokens are real


def width_of(given: Attended) -> int:
    """Return the larger padded dim of a head."""
    return padded(max(given.q.shape[-1], given.columns))


def takes_one_pass(given: Attended) -> bool:
    """Return whether the backward pass reads each token once, and so may overwrite it."""
    return width_of(given) in BACKWARD[given.q.dtype]


def gradient_shares(given: Attended) -> Shares:
    """Divide the sequences for the backward pass that sums gradients too, where it is one."""
    # It needs more registers: a multiprocessor has two programs at a time, and two after these.
    config = BACKWARD[given.q.dtype][width_of(given)]._replace(programs=264)
    return launch.shares_of(given.q, config)


def _blocks(z: Tensor | None, config: Config, real: bool) -> Tensor | Descriptor | None:
    """Describe the tokens z to the GPU where all are real and nothing is padded."""
    if z is None or not real or z.dtype != torch.bfloat16 or z.shape[-1] != padded(z.shape[-1]):
        return z
    return launch.described(z, config.block)


def attend(given: Attended, *, grams: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute outputs and Gram matrices; empty where they are not wanted."""
    q, k, *_, map_q, map_k = given
    config, (B, N, H, P), C = FORWARD[q.dtype][width_of(given)], q.shape, given.columns
    out, shape = q.new_empty((B, N, H, C) if C else (0,)), (B, H, P, P) if grams else (0,)
    g_q, g_k = (q.new_empty(shape, dtype=torch.float32) for _ in range(2))
    written, z_q, z_k = out if C else None, launch.readable(q), launch.readable(k)
    a_e, a_r, bias = launch.contiguous(given.a_e, given.a_r, given.bias)
    shares, tile = launch.spread_shares(q, config), min(config.tile, padded(max(P, C)))
    # Of the elu map, which no condition holds back then, the compiler would load nothing ahead.
    whole = shares.whole and "elu" not in (map_q, map_k)
    real = whole and given.token_mask is None and tile == padded(P)
    with summed(q, shares, *((g_q, g_k) if grams else (None, None))) as totals:
        forward_blocks[(shares.programs, -(-max(P, C) // tile))](
            _blocks(z_q, config, real), _blocks(z_k, config, real), a_e, a_r, bias,
            launch.mask_bytes(given.token_mask), written, *totals,
            *map(launch.strides, (z_q, z_k, written)), *map(launch.batch_stride, (a_e, a_r)),
            N, H, shares.splits, shares.tokens, P, C, map_q, map_k, DOTS[q.dtype],
            config.block, padded(P), tile, whole, **config.launch,
        )  # fmt: skip
    return out, g_q, g_k


def write_gradients(
    given: Attended,
    d: OutputGradients,
    into: InputGradients,
    by_counts: ByCounts | None = None,
    sums: Tensor | None = None,
) -> None:
    """Write the gradients of q, k, a_e, a_r and bias, where they are not None."""
    # In one pass alone: those of q and k may be divided by counts [B, N] of tokens; their sums over
    # each of the `gradient_shares` are written to sums [B, splits, 2 H, P].
    if d.out is None:
        for grad in into[2:]:
            if grad is not None:
                grad.zero_()
        into = into._replace(a_e=None, a_r=None, bias=None)
    config = BACKWARD[given.q.dtype].get(width_of(given))
    if config is not None:
        _write_at_once(given, d, into, config, by_counts, sums)
    else:
        _write_by_side(given, d, into)


def _write_at_once(
    given: Attended,
    d: OutputGradients,
    into: InputGradients,
    config: Config,
    by_counts: ByCounts | None,
    sums: Tensor | None,
) -> None:
    """All gradients in one pass, whose programs have one side each."""
    counts = None if by_counts is None else by_counts.counts
    z_q, z_k = launch.readable(given.q), launch.readable(given.k)
    d_rows = None if d.out is None else launch.readable(d.out)
    a_e, a_r, d_gram_q, d_gram_k = launch.contiguous(given.a_e, given.a_r, d.gram_q, d.gram_k)
    (B, N, H, P), C = given.q.shape, given.columns
    options: dict[str, int] = config.launch
    shares = launch.shares_of(given.q, config) if sums is None else gradient_shares(given)
    sums_run_on = into.a_e is not None or into.a_r is not None
    if sums is None and sums_run_on and not any(map(launch.batch_stride, (a_e, a_r))):
        shares = launch.in_runs(given.q, shares, config)
    if shares.sequences > 1:
        options |= RUN_REGISTERS.get(width_of(given), {})
    real = shares.whole and given.token_mask is None
    with (
        summed(given.q, shares, into.a_e, into.a_r, into.bias) as small,
        launch.writable(into.q) as dq_rows,
        launch.writable(into.k) as dk_rows,
    ):
        backward_blocks[(2 * shares.programs,)](
            _blocks(z_q, config, real), _blocks(z_k, config, real), a_e, a_r,
            launch.mask_bytes(given.token_mask), counts, _blocks(d_rows, config, real), d_gram_q,
            d_gram_k, dq_rows, dk_rows, *small, sums,
            *map(launch.strides, (z_q, z_k, d_rows, dq_rows, dk_rows)),
            launch.matrix_strides(counts), *map(launch.batch_stride, (a_e, a_r)), N, H,
            shares.splits, shares.tokens, B, shares.sequences if shares.sequences > 1 else None, P,
            C, given.map_q, given.map_k, DOTS[given.q.dtype], config.block, padded(P), padded(C),
            by_counts is not None, shares.whole, **options,
        )  # fmt: skip


def _write_by_side(given: Attended, d: OutputGradients, into: InputGradients) -> None:
    """For wide heads: queries and keys apart, and the gradients of A apart from theirs."""
    mask = given.token_mask
    for z, a, name, d_gram, dz, da in (
        (given.q, given.a_e, given.map_q, d.gram_q, into.q, into.a_e),
        (given.k, given.a_r, given.map_k, d.gram_k, into.k, into.a_r),
    ):
        rows = MomentInputs(z, None if a is None else d.out, mask, name)
        if dz is not None:
            matrix = None if rows.values is None else a
            fused_moment.pull_back_moment(rows, matrix, d_gram, fused_moment.MomentGradients(dz))
            if rows.values is not None and da is not None:
                fused_moment.add_moments(rows, da)
    if into.bias is not None and d.out is not None:
        real = d.out if mask is None else d.out.where(mask[:, :, None, None], 0.0)
        into.bias.copy_(real.sum((0, 1, 2), dtype=torch.float32))


@launched(*tt.LENGTHS)
def forward_blocks(
    q, k, a_e, a_r, bias, mask, out, gram_q, gram_k, q_strides, k_strides, out_strides, a_e_stride,
    a_r_stride, N, H, splits, tokens, P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr,
    MAP_K: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out = phi_q A_e + phi_k A_r + bias and the sums of phi phi^T, one tile of their columns."""
    b, h, first, last = tt.spread_tokens(tl.program_id(0), N, H, splits, tokens, BLOCK_N)
    column = tl.program_id(1) * TILE
    q, k = tt.sequence_of(q, q_strides, b, h), tt.sequence_of(k, k_strides, b, h)
    out = tt.sequence_of(out, out_strides, b, h) if out is not None else None
    head = h * (P * C)
    proj_e, scale_e = _projection(a_e, b * a_e_stride + head, column, P, C, BLOCK_P, TILE, DOT)
    proj_r, scale_r = _projection(a_r, b * a_r_stride + head, column, P, C, BLOCK_P, TILE, DOT)
    attend_tokens(
        q, k, bias, mask, out, gram_q, gram_k, proj_e, scale_e, proj_r, scale_r,
        tl.program_id(0).to(tl.int64), b, q_strides[1], k_strides[1], out_strides[1],
        N, first, last, column,
        a_e is not None, a_r is not None, P, C, MAP_Q, MAP_K, DOT, BLOCK_N, BLOCK_P, TILE, WHOLE,
    )  # fmt: skip


@triton.jit
def attend_tokens(
    q, k, bias, mask, out, gram_q, gram_k, proj_e, scale_e, proj_r, scale_r, program, b, q_stride,
    k_stride, out_stride, N, first, last, column, HAS_E: tl.constexpr, HAS_R: tl.constexpr,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Out of the tokens from first to last, and the program's Gram matrices."""
    end = None if WHOLE else last
    shift = tl.zeros([TILE], tl.float32)
    if bias is not None:
        c = column + tl.arange(0, TILE)
        shift = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)
    sum_q = tl.zeros([BLOCK_P, TILE], tl.float32)
    sum_k = tl.zeros([BLOCK_P, TILE], tl.float32)
    for start in range(first, last, BLOCK_N):
        real = tt.real_tokens(mask, b, N, start, end, BLOCK_N)
        total = tl.zeros([BLOCK_N, TILE], tl.float32) + shift[None, :]
        total, base_q, tile_q = _side_forward(
            q, start, q_stride, real, column, proj_e, scale_e, total,
            HAS_E, P, BLOCK_P, TILE, MAP_Q, DOT,
        )  # fmt: skip
        total, base_k, tile_k = _side_forward(
            k, start, k_stride, real, column, proj_r, scale_r, total,
            HAS_R, P, BLOCK_P, TILE, MAP_K, DOT,
        )  # fmt: skip
        if out is not None:
            if mask is not None:
                total = tl.where(real[:, None], total, 0.0)
            tt.store_rows(out, total, start, out_stride, end, column, C, TILE)
        if gram_q is not None:
            sum_q = tt.product(tl.trans(base_q), tile_q, sum_q)
        if gram_k is not None:
            sum_k = tt.product(tl.trans(base_k), tile_k, sum_k)
    if gram_q is not None:
        tt.store_block(gram_q + program * (P * P), sum_q, 0, column, P, P)
    if gram_k is not None:
        tt.store_block(gram_k + program * (P * P), sum_k, 0, column, P, P)


@triton.jit
def _side_forward(
    z, start, stride, real, column, proj, scale, total, HAS_A: tl.constexpr, P: tl.constexpr,
    BLOCK_P: tl.constexpr, TILE: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The output with the part of one block of queries or keys; Z and f^2 Z of phi = f z."""
    # The product comes first: norms are found while it runs.
    rows = tt.load_rows(z, start, stride, real, 0, P, BLOCK_P)
    inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
    base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
    if HAS_A:
        part = tt.product(base, proj, tl.zeros(total.shape, tl.float32))
        total += tt.scaled(part, factor * scale)
    tile = base
    if TILE != BLOCK_P:
        rows = tt.load_rows(z, start, stride, real, column, P, TILE)
        tile, _ = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
    return total, base, tt.scaled(tile, factor * factor).to(DOT)


@triton.jit
def _projection(
    a, offset, column,
    P: tl.constexpr, C: tl.constexpr, BLOCK_P: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of A of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, TILE], tl.float32)
    if a is not None:
        matrix = tt.load_matrix(a + offset, 0, column, P, C, BLOCK_P, TILE)
    return tt.fitted(matrix, DOT)


@launched(*tt.LENGTHS)
def backward_blocks(
    q, k, a_e, a_r, mask, counts, d_out, d_gram_q, d_gram_k, dq, dk, da_e, da_r, d_bias, sums,
    q_strides, k_strides, d_out_strides, dq_strides, dk_strides, count_strides, a_e_stride,
    a_r_stride, N, H, splits, tokens, B, sequences, P: tl.constexpr, C: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, DIVIDED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Dz of dphi = d_out A^T + phi (dG + dG^T), and the sums of phi d_out^T and of d_out.

    Neighbouring programs have queries and keys of the same tokens: the second finds d_out in
    the cache. If DIVIDED, dz is divided by the number of real tokens up to each.
    """
    program, tensors = tl.program_id(0) // 2, (mask, counts, d_out, sums)
    division = N, H, splits, tokens, B, sequences
    if tl.program_id(0) % 2 == 0:
        _side_backward(
            (q, a_e, d_gram_q, dq, da_e, d_bias), tensors, program, 0, division,
            (q_strides, d_out_strides, dq_strides, count_strides), a_e_stride,
            P, C, MAP_Q, DOT, BLOCK_N, BLOCK_P, BLOCK_C, DIVIDED, WHOLE,
        )  # fmt: skip
    else:
        _side_backward(
            (k, a_r, d_gram_k, dk, da_r, None), tensors, program, H, division,
            (k_strides, d_out_strides, dk_strides, count_strides), a_r_stride,
            P, C, MAP_K, DOT, BLOCK_N, BLOCK_P, BLOCK_C, DIVIDED, WHOLE,
        )  # fmt: skip


@triton.jit
def _side_backward(  # noqa: C901 - most conditions are constants
    side, tensors, program, row, division, strides, a_stride,
    P: tl.constexpr, C: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
    DIVIDED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one side; its heads have the rows of sums from the given one on."""
    z, a, d_gram, dz, da, d_bias = side
    mask, counts, d_out, sums = tensors
    z_strides, d_out_strides, dz_strides, count_strides = strides
    N, H, splits, tokens, B, sequences = division
    b, h, first, last = tt.share_of_tokens(program, N, H, splits, tokens)
    proj, scale = _projection(a, b * a_stride + h * (P * C), 0, P, C, BLOCK_P, BLOCK_C, DOT)
    sum_a = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    sum_bias = tl.zeros([16, BLOCK_C], tl.float32)
    sum_z = tl.zeros([BLOCK_N // 2, BLOCK_P], tl.float32)
    number = 1  # of which the loop vanishes
    if sequences is not None:
        b, first, last = b * sequences, 0, N
        number = tl.minimum(sequences, B - program // H * sequences)
    end = None if WHOLE else last
    # What a sequence begins with is found anew for each: there are no registers to keep it in.
    for each in tl.range(number, disable_licm=True):
        at = b + each
        rows_of, dz_of = tt.sequence_of(z, z_strides, at, h), tt.sequence_of(dz, dz_strides, at, h)
        d_out_of = tt.sequence_of(d_out, d_out_strides, at, h) if d_out is not None else None
        both, scale_both = _both_ways(d_gram, (at * H + h) * (P * P), P, BLOCK_P, DOT)
        for start in range(first, last, BLOCK_N):
            real = tt.real_tokens(mask, at, N, start, end, BLOCK_N)
            d_rows = tl.zeros([BLOCK_N, BLOCK_C], DOT)
            if d_out is not None:
                stride = d_out_strides[1]
                d_rows = tt.load_rows(d_out_of, start, stride, real, 0, C, BLOCK_C).to(DOT)
            if d_bias is not None:
                groups = tl.reshape(d_rows.to(tl.float32), [BLOCK_N // 16, 16, BLOCK_C])
                sum_bias += tl.sum(groups, 0)
            share = tl.full([BLOCK_N], 1.0, tl.float32)
            if DIVIDED:
                count = tt.counted(counts, count_strides, at, start, end, BLOCK_N)
                share /= tl.maximum(count, 1.0)
            rows = tt.load_rows(rows_of, start, z_strides[1], real, 0, P, BLOCK_P)
            d_z, sum_a = _block_backward(
                rows, real, share, d_rows, proj, scale, both, scale_both, sum_a,
                da is not None, d_gram is not None, FEATURE_MAP, DOT,
            )  # fmt: skip
            tt.store_rows(dz_of, d_z, start, dz_strides[1], end, 0, P, BLOCK_P)
            if sums is not None:
                sum_z += tt.by_eight(d_z)
    if da is not None:
        tt.store_block(da + program.to(tl.int64) * (P * C), tl.trans(sum_a), 0, 0, P, C)
    if d_bias is not None:
        of_bias = tl.sum(sum_bias, 0)[None, :]
        tt.store_block(d_bias + program.to(tl.int64) * C, of_bias, 0, 0, 1, C)
    if sums is not None:
        place = sums + (program // H * (2 * H) + row + h) * P
        tt.store_block(place, tl.sum(sum_z, 0)[None, :], 0, 0, 1, P)


@triton.jit
def _block_backward(
    rows, real, share, d_rows, proj, scale, both, scale_both, sum_a,
    HAS_A: tl.constexpr, HAS_GRAM: tl.constexpr, FEATURE_MAP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries or keys, and the sum of d_out phi^T grown by this block."""
    inverse = tt.inverse_norms(rows, FEATURE_MAP, DOT)
    base, factor = tt.features(rows, inverse, real, FEATURE_MAP, DOT)
    d_phi = tl.zeros(rows.shape, tl.float32)
    if HAS_A:
        sum_a = tt.product(tl.trans(d_rows), tt.scaled(base, factor).to(DOT), sum_a)
    if HAS_GRAM:
        d_phi = tt.scaled(tt.product(base, both, d_phi), factor * (scale_both / scale))
    if HAS_A:
        d_phi = tt.product(d_rows, tl.trans(proj), d_phi)
    share *= scale
    if FEATURE_MAP == "cosine":
        inverse *= share  # the derivative has it as a factor
    else:
        d_phi = tt.scaled(d_phi, share)
    return tt.pull_back(base, factor, inverse, d_phi, FEATURE_MAP), sum_a


@triton.jit
def _both_ways(d_gram, offset, P: tl.constexpr, BLOCK_P: tl.constexpr, DOT: tl.constexpr):
    """DG + dG^T of this head, fitted, and its scale; zero where there is none."""
    matrix = tl.zeros([BLOCK_P, BLOCK_P], tl.float32)
    if d_gram is not None:
        matrix = tt.load_matrix(d_gram + offset, 0, 0, P, P, BLOCK_P, BLOCK_P)
        matrix += tl.trans(matrix)
    return tt.fitted(matrix, DOT)
