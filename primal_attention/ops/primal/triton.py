"""Primal-Attention as fused ops: queries and keys are read once, outputs written once.

Letters: B batch, N tokens, H heads, C head dim, P feature dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.column_sum.triton_add_up import summed
from primal_attention.ops.gpu import device_of
from primal_attention.ops.launch import mask_bytes, padded
from primal_attention.ops.moment.triton import add_moments, pull_back
from primal_attention.ops.primal.triton_blocks import backward_blocks, forward_blocks
from primal_attention.ops.triton_launch import (
    DOTS,
    Config,
    Descriptor,
    Shares,
    batch_stride,
    contiguous,
    count_strides,
    described,
    in_runs,
    readable,
    shares_of,
    spread_shares,
    strides,
    writable,
)

# By the larger padded dim of a head.
_HALF = {
    16: Config(block=128, tile=16, num_warps=4, num_stages=3),
    32: Config(block=64, tile=32, num_warps=4, num_stages=3),
    64: Config(block=64, tile=64, num_warps=4, num_stages=3),
    128: Config(block=64, tile=64, num_warps=8, num_stages=2),
    256: Config(block=32, tile=32, num_warps=8, num_stages=2),
}
FORWARD = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
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
_HALF_BACKWARD = {
    16: Config(block=128, tile=16, num_warps=4, num_stages=3),
    32: Config(block=64, tile=32, num_warps=4, num_stages=3),
    64: Config(block=64, tile=64, num_warps=4, num_stages=3, programs=198),
}
BACKWARD = {
    torch.bfloat16: _HALF_BACKWARD,
    torch.float16: _HALF_BACKWARD,
    torch.float32: {
        16: Config(block=32, tile=16, num_warps=4, num_stages=2),
        32: Config(block=32, tile=32, num_warps=4, num_stages=2),
    },
}
# By the width, with which a multiprocessor has room for as many that take several sequences.
RUN_REGISTERS = {64: {"maxnreg": 168}}


class ByCounts(NamedTuple):
    """What gradients are divided by: the number of real tokens up to each."""

    counts: Tensor | None  # [B, N]; None where all tokens are real


def takes(
    q: Tensor, k: Tensor | None, a_e: Tensor | None, a_r: Tensor | None, *options: Any
) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    same = k is None or (k.dtype == q.dtype and k.shape == q.shape)
    return q.dtype in DOTS and same and _width(q, a_e, a_r) <= 256 and q.numel() > 0


def takes_one_pass(q: Tensor, a_e: Tensor | None, a_r: Tensor | None) -> bool:
    """Whether the backward pass reads each token once, so that its gradient may take its place."""
    return _width(q, a_e, a_r) in BACKWARD[q.dtype]


def gradient_shares(q: Tensor, a_e: Tensor | None, a_r: Tensor | None) -> Shares:
    """The division of the sequences by the backward pass that sums gradients too, where it is one.

    It needs more registers: a multiprocessor has two programs at a time, and two after these.
    """
    return shares_of(q, BACKWARD[q.dtype][_width(q, a_e, a_r)]._replace(programs=264))


def _width(q: Tensor, a_e: Tensor | None, a_r: Tensor | None) -> int:
    return padded(max(q.shape[-1], _columns(a_e, a_r)))


def _columns(a_e: Tensor | None, a_r: Tensor | None) -> int:
    return max(0 if a is None else a.shape[-1] for a in (a_e, a_r))


def _blocks(z: Tensor | None, config: Config, real: bool) -> Tensor | Descriptor | None:
    """The tokens z as they are loaded: by a descriptor where all are real and nothing is padded."""
    if z is None or not real or z.dtype != torch.bfloat16 or z.shape[-1] != padded(z.shape[-1]):
        return z
    return described(z, config.block)


def forward(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    gram_q: bool,
    gram_k: bool,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and Gram matrices; empty where they are not wanted."""
    config = config or FORWARD[q.dtype][_width(q, a_e, a_r)]
    (B, N, H, P), C = q.shape, _columns(a_e, a_r)
    out = q.new_empty((B, N, H, C) if C else (0,))
    g_q, g_k = (
        q.new_empty((B, H, P, P) if g else (0,), dtype=torch.float32) for g in (gram_q, gram_k)
    )
    written = out if C else None
    z_q, z_k = readable(q), None if k is None else readable(k)
    a_e, a_r, bias = contiguous(a_e, a_r, bias)
    shares, tile = spread_shares(q, config), min(config.tile, padded(max(P, C)))
    # Of the elu map, which no condition holds back then, the compiler would load nothing ahead.
    whole = shares.whole and "elu" not in (map_q, map_k)
    real = whole and token_mask is None and tile == padded(P)
    with (
        summed(q, shares, g_q if gram_q else None, g_k if gram_k else None) as grams,
        device_of(q),
    ):
        forward_blocks[(shares.programs, -(-max(P, C) // tile))](
            _blocks(z_q, config, real), _blocks(z_k, config, real), a_e, a_r, bias,
            mask_bytes(token_mask), written, *grams,
            strides(z_q), strides(z_k), strides(written), batch_stride(a_e), batch_stride(a_r),
            N, H, shares.splits, shares.tokens, P, C, map_q, map_k, DOTS[q.dtype],
            config.block, padded(P), tile, whole, **config.launch,
        )  # fmt: skip
    return out, g_q, g_k


def backward(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, a_e, a_r and bias; empty where there is no such input."""
    grads = [None if x is None else torch.empty_like(x) for x in (q, k, a_e, a_r, bias)]
    maps = token_mask, map_q, map_k
    write_gradients(q, k, a_e, a_r, *maps, d_out, d_gram_q, d_gram_k, grads, config)
    dq, dk, da_e, da_r, d_bias = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, da_e, da_r, d_bias


def write_gradients(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    grads: list[Tensor | None],
    config: Config | None = None,
    by_counts: ByCounts | None = None,
    sums: Tensor | None = None,
) -> None:
    """Write the gradients of q, k, a_e, a_r and bias, where they are not None.

    In one pass alone: those of q and k may be divided by counts [B, N] of tokens; their
    sums over each of the `gradient_shares` are written to sums [B, splits, 2 H, P].
    """
    if d_out is None:
        for grad in grads[2:]:
            if grad is not None:
                grad.zero_()
    config = config or BACKWARD[q.dtype].get(_width(q, a_e, a_r))
    inputs = q, k, a_e, a_r, token_mask, map_q, map_k, d_out, d_gram_q, d_gram_k
    if config is not None:
        _fused_backward(*inputs, grads, config, by_counts, sums)
    else:
        _backward_by_side(*inputs, grads)


def _fused_backward(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    grads: list[Tensor | None],
    config: Config,
    by_counts: ByCounts | None,
    sums: Tensor | None,
) -> None:
    """All gradients in one pass, whose programs have one side each."""
    counts = None if by_counts is None else by_counts.counts
    dq, dk, da_e, da_r, d_bias = grads if d_out is not None else [*grads[:2], None, None, None]
    z_q, z_k, d_rows = (None if x is None else readable(x) for x in (q, k, d_out))
    a_e, a_r, d_gram_q, d_gram_k = contiguous(a_e, a_r, d_gram_q, d_gram_k)
    (B, N, H, P), C = q.shape, _columns(a_e, a_r)
    sides, options = 1 if k is None else 2, config.launch
    shares = shares_of(q, config) if sums is None else gradient_shares(q, a_e, a_r)
    sums_run_on = (da_e is not None or da_r is not None) and not any(map(batch_stride, (a_e, a_r)))
    if sums is None and sums_run_on:
        shares = in_runs(q, shares, config._replace(programs=2 * config.programs // sides))
    if shares.sequences > 1:
        options |= RUN_REGISTERS.get(_width(q, a_e, a_r), {})
    real = shares.whole and token_mask is None
    with (
        summed(q, shares, da_e, da_r, d_bias) as small,
        writable(dq) as dq_rows,
        writable(dk) as dk_rows,
        device_of(q),
    ):
        backward_blocks[(sides * shares.programs,)](
            _blocks(z_q, config, real), _blocks(z_k, config, real), a_e, a_r,
            mask_bytes(token_mask), counts, _blocks(d_rows, config, real), d_gram_q, d_gram_k,
            dq_rows, dk_rows, *small, sums,
            strides(z_q), strides(z_k), strides(d_rows), strides(dq_rows), strides(dk_rows),
            count_strides(counts), batch_stride(a_e), batch_stride(a_r),
            N, H, shares.splits, shares.tokens,
            B, shares.sequences if shares.sequences > 1 else None,
            P, C, map_q, map_k, DOTS[q.dtype], config.block, padded(P), padded(C),
            by_counts is not None, shares.whole, **options,
        )  # fmt: skip


def _backward_by_side(
    q: Tensor,
    k: Tensor | None,
    a_e: Tensor | None,
    a_r: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    grads: list[Tensor | None],
) -> None:
    """For wide heads: queries and keys apart, and the gradients of A apart from theirs."""
    dq, dk, da_e, da_r, d_bias = grads
    sides = (q, a_e, map_q, d_gram_q, dq, da_e), (k, a_r, map_k, d_gram_k, dk, da_r)
    for z, a, feature_map, d_gram, dz, da in sides:
        if z is None or dz is None:
            continue
        d_side = None if a is None else d_out
        pull_back(z, d_side, a, d_gram, token_mask, feature_map, dz, None)
        if d_side is not None and da is not None:
            add_moments(z, d_side, token_mask, feature_map, da)
    if d_bias is not None and d_out is not None:
        real = d_out if token_mask is None else d_out.where(token_mask[:, :, None, None], 0.0)
        d_bias.copy_(real.sum((0, 1, 2), dtype=torch.float32))
