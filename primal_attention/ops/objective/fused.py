r"""The KSVD objective J from Gram matrices, as a fused op.

A program takes one sequence, head and side: queries with W_e or keys with W_r, in square blocks.
Letters: B batch, H heads, P feature dim, S directions.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.objective.eager import MeanJInputs, mean_j_of_grams
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.triton import launch
from primal_attention.ops.triton import tiles as tt
from primal_attention.ops.triton.launch import PRODUCTS, add_up, launched, padded

_BLOCK = 64  # rows and columns of a Gram matrix that are multiplied at once, at most
_TILE = 32  # directions, at most
_SEQUENCES, _PARTS = 256, 16  # whose J are added up at once, and how many parts of each
_REGISTERS = {"maxnreg": 80}  # of a thread: one less than it would take, for one program more


class MeanJOp(FusedOp):
    """Two launches forward, and one or two backward."""

    name = "mean_j"
    inputs = MeanJInputs
    differentiable = ("gram_q", "gram_k", "w_e", "w_r", "lambda_diag", "trace")
    outputs = ("mean", "slopes", "energies")  # of the mean by each J [B]; [2, B, H, S]

    def supports(self, given: MeanJInputs) -> bool:
        """Return whether all are float32, of heads that are not too wide."""
        tensors = given.gram_q, given.gram_k, given.w_e, given.w_r, given.lambda_diag
        single = all(x.dtype == torch.float32 for x in tensors)
        same = given.trace is None or given.trace.dtype == torch.float32
        return single and same and given.gram_q.shape[-1] <= 256 and given.w_e.numel() > 0

    def empty(self, given: MeanJInputs) -> Sequence[Tensor]:
        """Allocate the mean, its slopes and the energies."""
        gram, (B, H, _, S, _, _) = given.gram_q, _sizes(given)
        return gram.new_empty(()), gram.new_empty(B), gram.new_empty(2, B, H, S)

    def forward(self, given: MeanJInputs, *, keep: bool) -> Sequence[Tensor]:
        """Compute the mean, its derivative by each J, and the energies of both sides."""
        B, H, P, S, block, tile = _sizes(given)
        tiles = -(-S // tile)
        mean, slopes, energies = self.empty(given)
        parts = given.gram_q.new_empty(B, H, 2, tiles)
        w_e, w_r = _readable(given.w_e), _readable(given.w_r)
        shared = launch.contiguous(given.lambda_diag, given.num_queries, given.num_keys)
        energy_blocks[(2 * B * H, tiles)](
            *launch.contiguous(given.gram_q, given.gram_k), w_e, w_r, *shared, energies, parts,
            _strides(w_e), _strides(w_r), B, H, P, S,
            given.averaged, given.lambda_squared, given.trace is None, block, tile,
            _precision(given), num_warps=launch.warps_of(2 * B * H * tiles),
            **(_REGISTERS if given.half and P <= _BLOCK else {}),
        )  # fmt: skip
        mean_block[(1,)](
            parts, *launch.contiguous(given.trace), *shared[1:], mean, slopes, B, H, 2 * H * tiles,
            given.squared, _SEQUENCES, _PARTS, num_warps=4,
        )  # fmt: skip
        return mean, slopes, energies

    def backward(self, given: MeanJInputs, call: Backward) -> dict[str, Tensor]:
        """Compute gradients of Gram matrices, weights, Lambda and the trace."""
        (slopes, energies), [d_mean] = call.kept, call.grads
        assert d_mean is not None
        gram, (B, H, P, S, block, tile) = given.gram_q, _sizes(given)
        d_grams, d_weights = gram.new_empty(2, B, H, P, P), gram.new_empty(2, B, H, P, S)
        d_lambda, d_trace = gram.new_empty(H, S), gram.new_empty(H)
        w_e, w_r = _readable(given.w_e), _readable(given.w_r)
        blocks = -(-P // block)
        gradient_blocks[(4 * (B + 1) * H, blocks)](
            *launch.contiguous(given.gram_q, given.gram_k), w_e, w_r,
            *launch.contiguous(given.lambda_diag, given.num_queries, given.num_keys), slopes,
            energies, d_mean, d_grams, d_weights, d_lambda,
            None if given.trace is None else d_trace, _strides(w_e), _strides(w_r), B, H, P, S,
            given.averaged, given.lambda_squared, given.trace is None, block, tile,
            _precision(given), num_warps=launch.warps_of(4 * B * H * blocks),
        )  # fmt: skip
        if w_e.ndim == 3:
            totals = d_weights[:, 0] if B == 1 else gram.new_empty(2, H, P, S)
            if B > 1:
                add_up(*zip(d_weights, totals, strict=True))
            d_weights = totals
        names = "gram_q", "gram_k", "w_e", "w_r", "lambda_diag", "trace"
        return dict(zip(names, (*d_grams, *d_weights, d_lambda, d_trace), strict=True))

    def eager(self, given: MeanJInputs) -> Sequence[Tensor]:
        """Compute the mean in plain PyTorch."""
        return (mean_j_of_grams(given),)


def _precision(given: MeanJInputs) -> str:
    # Gram matrices of tokens in half precision carry larger errors already.
    return PRODUCTS[torch.bfloat16 if given.half else torch.float32]


def _sizes(given: MeanJInputs) -> tuple[int, int, int, int, int, int]:
    """Return B, H, P and S, rows of a block and directions of a tile."""
    (B, H, P, _), S = given.gram_q.shape, given.w_e.shape[-1]
    return B, H, P, S, min(_BLOCK, padded(P)), min(_TILE, padded(S))


def _readable(w: Tensor) -> Tensor:
    """Copy the weights where a matrix [P, S] has gaps."""
    return w if w.stride()[-2:] == (w.shape[-1], 1) else w.contiguous()


def _strides(w: Tensor) -> tuple[int, int]:
    """Return strides of sequences and heads of the weights [B, H, P, S]; 0 for [H, P, S]."""
    return (w.stride(0) if w.ndim == 4 else 0), w.stride(-3)


SIZES = ["B", "H"]  # arguments whose values make no difference to the code


@launched(*SIZES)
def energy_blocks(
    gram_q, gram_k, w_e, w_r, lambda_diag, num_queries, num_keys, energies, parts,
    e_strides, r_strides, B, H, P: tl.constexpr, S: tl.constexpr,
    AVERAGED: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, OWN_TRACE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the energies diag(W^T G W) of a tile of directions, and their part of J."""
    program, side, column = tl.program_id(0) // 2, tl.program_id(0) % 2, tl.program_id(1) * TILE
    b, h = (program // H).to(tl.int64), (program % H).to(tl.int64)
    gram, w, other, num_tokens = _side_of(
        gram_q, gram_k, w_e, w_r, num_queries, num_keys, e_strides, r_strides, side, b, h
    )
    gram += (b * H + h) * (P * P)
    energy = tl.zeros([TILE], tl.float32)
    own = tl.zeros([TILE], tl.float32)
    for row in range(0, P, BLOCK):
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for inner in range(0, P, BLOCK):
            block = tt.load_matrix(gram, row, inner, P, P, BLOCK, BLOCK)
            part = tt.load_matrix(w, inner, column, P, S, BLOCK, TILE)
            total = tt.product(block, part, total, PRECISION)
        rows = tt.load_matrix(w, row, column, P, S, BLOCK, TILE)
        energy += tl.sum(rows * total, 0)
        if OWN_TRACE:
            own += tl.sum(rows * tt.load_matrix(other, row, column, P, S, BLOCK, TILE), 0)
    if AVERAGED:
        energy = energy / _at_least_one(num_tokens, b)
    s = column + tl.arange(0, TILE)
    place = ((side * B + b) * H + h) * S
    tl.store(energies + place + s, energy, mask=s < S)
    diagonal = _diagonal(lambda_diag, h, s, S, LAMBDA_SQUARED)
    part = tl.sum(diagonal * energy - own, 0) / (2 * H)  # either side has one half of the trace
    tl.store(parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), part)


@triton.jit
def _side_of(
    gram_q, gram_k, w_e, w_r, num_queries, num_keys, e_strides, r_strides, side, b, h
):  # fmt: skip
    """Gram matrices, weights, weights of the other side and numbers of tokens of one side."""
    w_e += b * e_strides[0] + h * e_strides[1]
    w_r += b * r_strides[0] + h * r_strides[1]
    if side == 0:
        gram, w, other, num_tokens = gram_q, w_e, w_r, num_queries
    else:
        gram, w, other, num_tokens = gram_k, w_r, w_e, num_keys
    return gram, w, other, num_tokens


@triton.jit
def _at_least_one(num_tokens, b):
    return tl.maximum(tl.load(num_tokens + b).to(tl.float32), 1.0)


@triton.jit
def _diagonal(lambda_diag, h, s, S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr):
    diagonal = tl.load(lambda_diag + h * S + s, mask=s < S, other=0.0)
    return diagonal * diagonal if LAMBDA_SQUARED else diagonal


@launched(*SIZES, "number")
def mean_block(
    parts, trace, num_queries, num_keys, mean, slopes, B, H, number,
    SQUARED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Average the parts [B, number] of J, with slopes, over sequences with tokens."""
    count = tl.zeros([BLOCK], tl.float32)
    for start in range(0, B, BLOCK):
        count += tl.where(_is_real(num_queries, num_keys, start, B, BLOCK), 1.0, 0.0)
    share = 1.0 / tl.maximum(tl.sum(count, 0), 1.0)
    total = tl.zeros([BLOCK], tl.float32)
    c = tl.arange(0, PARTS)
    shifts = tl.zeros([PARTS], tl.float32)
    if trace is not None:
        for head in range(0, H, PARTS):
            shifts += tl.load(trace + head + c, mask=head + c < H, other=0.0)
    shift = tl.sum(shifts, 0) / H
    for start in range(0, B, BLOCK):
        b = start + tl.arange(0, BLOCK)
        j = tl.zeros([BLOCK], tl.float32) - shift
        for column in range(0, number, PARTS):
            places = parts + b[:, None].to(tl.int64) * number + (column + c)[None, :]
            exists = (b < B)[:, None] & (column + c < number)[None, :]
            j += tl.sum(tl.load(places, mask=exists, other=0.0), 1)
        real = _is_real(num_queries, num_keys, start, B, BLOCK)
        slope = 2.0 * j if SQUARED else tl.full([BLOCK], 1.0, tl.float32)
        tl.store(slopes + b, tl.where(real, slope * share, 0.0), mask=b < B)
        total += tl.where(real, j * j if SQUARED else j, 0.0)
    tl.store(mean, tl.sum(total, 0) * share)


@triton.jit
def _is_real(num_queries, num_keys, start, B, BLOCK: tl.constexpr):
    """Mark the sequences from start on that exist and have a token on both sides."""
    b = start + tl.arange(0, BLOCK)
    queries = tl.load(num_queries + b, mask=b < B, other=0)
    return (queries > 0) & (tl.load(num_keys + b, mask=b < B, other=0) > 0)


@launched(*SIZES)
def gradient_blocks(
    gram_q, gram_k, w_e, w_r, lambda_diag, num_queries, num_keys, slopes, energies, d_mean, d_grams,
    d_weights, d_lambda, d_trace, e_strides, r_strides, B, H, P: tl.constexpr, S: tl.constexpr,
    AVERAGED: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, OWN_TRACE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a block of rows of dW = (G + G^T) W diag(c), or of dG = W diag(c) W^T.

    The first program of each head takes the sums over all sequences. The last sequences come first:
    after a forward pass the cache has them still.
    """
    program, side, kind = tl.program_id(0) // 4 - H, tl.program_id(0) // 2 % 2, tl.program_id(0) % 2
    row = tl.program_id(1) * BLOCK
    if program < 0:
        if (side == 0) & (kind == 0) & (row == 0):
            _sums_over_sequences(
                slopes, energies, d_mean, lambda_diag, d_lambda, d_trace, B, H,
                (program + H).to(tl.int64), S, LAMBDA_SQUARED, TILE,
            )  # fmt: skip
        return
    b, h = (B - 1 - program // H).to(tl.int64), (program % H).to(tl.int64)
    gram, w, other, num_tokens = _side_of(
        gram_q, gram_k, w_e, w_r, num_queries, num_keys, e_strides, r_strides, side, b, h
    )
    matrix = (side * B + b) * H + h
    d_j = tl.load(d_mean) * tl.load(slopes + b) / H
    factor = 0.5 * d_j
    if AVERAGED:
        factor = factor / _at_least_one(num_tokens, b)
    if kind == 0:
        _weight_rows(
            gram + (b * H + h) * (P * P), w, other, lambda_diag, d_weights + matrix * (P * S),
            d_j, factor, h, row, P, S, LAMBDA_SQUARED, OWN_TRACE, BLOCK, TILE, PRECISION,
        )  # fmt: skip
    else:
        for inner in range(0, P, BLOCK):
            total = tl.zeros([BLOCK, BLOCK], tl.float32)
            for column in range(0, S, TILE):
                s = column + tl.arange(0, TILE)
                c = factor * _diagonal(lambda_diag, h, s, S, LAMBDA_SQUARED)
                rows = tt.load_matrix(w, row, column, P, S, BLOCK, TILE) * c[None, :]
                part = tt.load_matrix(w, inner, column, P, S, BLOCK, TILE)
                total = tt.product(rows, tl.trans(part), total, PRECISION)
            tt.store_block(d_grams + matrix * (P * P), total, row, inner, P, P)


@triton.jit
def _weight_rows(
    gram, w, other, lambda_diag, d_w, d_j, factor, h, row,
    P: tl.constexpr, S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, OWN_TRACE: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for column in range(0, S, TILE):
        total = tl.zeros([BLOCK, TILE], tl.float32)
        for inner in range(0, P, BLOCK):
            both = tt.load_matrix(gram, row, inner, P, P, BLOCK, BLOCK)
            down = both
            if P > BLOCK:
                down = tt.load_matrix(gram, inner, row, P, P, BLOCK, BLOCK)
            part = tt.load_matrix(w, inner, column, P, S, BLOCK, TILE)
            total = tt.product(both + tl.trans(down), part, total, PRECISION)
        s = column + tl.arange(0, TILE)
        total *= (factor * _diagonal(lambda_diag, h, s, S, LAMBDA_SQUARED))[None, :]
        if OWN_TRACE:
            total -= d_j * tt.load_matrix(other, row, column, P, S, BLOCK, TILE)
        tt.store_block(d_w, total, row, column, P, S)


@triton.jit
def _sums_over_sequences(
    slopes, energies, d_mean, lambda_diag, d_lambda, d_trace, B, H, h,
    S: tl.constexpr, LAMBDA_SQUARED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of Lambda and of the trace of one head."""
    scale = tl.load(d_mean) / H
    total = tl.zeros([TILE], tl.float32)
    for column in range(0, S, TILE):
        s = column + tl.arange(0, TILE)
        d_diagonal = tl.zeros([TILE], tl.float32)
        total = tl.zeros([TILE], tl.float32)
        for start in range(0, B, TILE):
            b = start + tl.arange(0, TILE)
            slope = tl.load(slopes + b, mask=b < B, other=0.0)
            total += slope
            places = energies + ((b[:, None].to(tl.int64) * H + h) * S + s[None, :])
            exists = (b < B)[:, None] & (s < S)[None, :]
            energy = tl.load(places, mask=exists, other=0.0)
            energy += tl.load(places + B.to(tl.int64) * H * S, mask=exists, other=0.0)
            d_diagonal += tl.sum(slope[:, None] * energy, 0)
        d_diagonal *= 0.5 * scale
        if LAMBDA_SQUARED:
            d_diagonal *= 2.0 * tl.load(lambda_diag + h * S + s, mask=s < S, other=0.0)
        tl.store(d_lambda + h * S + s, d_diagonal, mask=s < S)
    if d_trace is not None:
        tl.store(d_trace + h, -scale * tl.sum(total, 0))
