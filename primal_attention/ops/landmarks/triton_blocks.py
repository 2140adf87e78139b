"""The fused pass that finds the landmarks of one sequence.

The token of a landmark is found by counting: as many positions lie before it as have seen no more
real tokens than its order.

Letters: N tokens, M landmarks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_kernel import launched


@launched
@triton.jit(do_not_specialize=["N", "M"])
def index_blocks(
    mask, moves, drops, index, N, M, jitter, dropout,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Positions of a block of landmarks of one sequence."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    num_tokens = N
    if mask is not None:
        mask += b * N
        counts = tl.zeros([BLOCK_N], tl.int32)
        for start in range(0, N, BLOCK_N):
            counts += _real(mask, start, N, BLOCK_N)
        num_tokens = tl.sum(counts)
    last = tl.maximum(num_tokens - 1, 0)
    order = i.to(tl.int64) * last // tl.maximum(M - 1, 1)
    if moves is not None:
        move = tl.load(moves + b * M + i, mask=i < M, other=0.5).to(tl.float32)
        order = _jittered(order, last, M, move, jitter)
    position = order
    if mask is not None:
        position = tl.where(num_tokens > 0, _token_of(order, mask, N, BLOCK_N), -1)
    if drops is not None:
        drop = tl.load(drops + b * M + i, mask=i < M, other=0.0).to(tl.float32)
        position = tl.where(drop >= dropout, position, -1)
    tl.store(index + b * M + i, position.to(tl.int64), mask=i < M)


@triton.jit
def _real(mask, start, N, BLOCK_N: tl.constexpr):
    """1 at the real tokens from start on, else 0."""
    n = start + tl.arange(0, BLOCK_N)
    return (tl.load(mask + n, mask=n < N, other=0) != 0).to(tl.int32)


@triton.jit
def _jittered(order, last, M, move, jitter):
    """The order, moved by a whole number of tokens; halves are rounded to even numbers."""
    spacing = tl.div_rn(last.to(tl.float32), tl.maximum(M - 1, 1).to(tl.float32))
    offset = (2.0 * move - 1.0) * jitter * spacing
    below = tl.floor(offset)
    whole = below.to(tl.int64)
    rest = offset - below
    up = (rest > 0.5) | ((rest == 0.5) & (whole % 2 != 0))
    moved = order + whole + up.to(tl.int64)
    return tl.minimum(tl.maximum(moved, 0), last)


@triton.jit
def _token_of(order, mask, N, BLOCK_N: tl.constexpr):
    """Position of each real token, counted among the real ones."""
    before = tl.zeros(order.shape, tl.int32)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, N, BLOCK_N):
        real = _real(mask, start, N, BLOCK_N)
        along = seen + tl.cumsum(real, 0)
        before += tl.sum((along[None, :] <= order[:, None]).to(tl.int32), 1)
        seen += tl.sum(real)
    return before
