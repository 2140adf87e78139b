"""The KSVD objective as fused ops.

Letters: B batch, H heads, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.column_sum.triton_add_up import add_up
from primal_attention.ops.gpu import device_of
from primal_attention.ops.ksvd.triton_blocks import energy_blocks, gradient_blocks, mean_block
from primal_attention.ops.launch import padded
from primal_attention.ops.triton_launch import PRODUCTS, contiguous, warps_of

_BLOCK = 64  # rows and columns of a Gram matrix that are multiplied at once, at most
_TILE = 32  # directions, at most
_SEQUENCES, _PARTS = 256, 16  # whose J are added up at once, and how many parts of each
_REGISTERS = {"maxnreg": 80}  # of a thread: one less than it would take, for one program more


def takes(gram_q: Tensor, gram_k: Tensor, w_e: Tensor, w_r: Tensor, *rest: Any) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    single = all(x.dtype == torch.float32 for x in (gram_q, gram_k, w_e, w_r, rest[0]))
    return single and gram_q.shape[-1] <= 256 and gram_q.numel() * w_e.numel() > 0


def forward(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    lambda_diag: Tensor,
    trace: Tensor | None,
    num_queries: Tensor,
    num_keys: Tensor,
    averaged: bool,
    lambda_squared: bool,
    squared: bool,
    half: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean, its derivative by each J, [B], and the energies of both sides, [2, B, H, S]."""
    B, H, P, S, block, tile = _sizes(gram_q, w_e)
    tiles = -(-S // tile)
    energies, parts = gram_q.new_empty(2, B, H, S), gram_q.new_empty(B, H, 2, tiles)
    mean, slopes = gram_q.new_empty(()), gram_q.new_empty(B)
    w_e, w_r = _readable(w_e), _readable(w_r)
    shared = contiguous(lambda_diag, num_queries, num_keys)
    with device_of(gram_q):
        energy_blocks[(2 * B * H, tiles)](
            *contiguous(gram_q, gram_k), w_e, w_r, *shared, energies, parts,
            _strides(w_e), _strides(w_r), B, H, P, S,
            averaged, lambda_squared, trace is None, block, tile, _precision(half),
            num_warps=warps_of(2 * B * H * tiles), **(_REGISTERS if half and P <= _BLOCK else {}),
        )  # fmt: skip
        mean_block[(1,)](
            parts, *contiguous(trace), *shared[1:], mean, slopes, B, H, 2 * H * tiles,
            squared, _SEQUENCES, _PARTS, num_warps=4,
        )  # fmt: skip
    return mean, slopes, energies


def backward(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    lambda_diag: Tensor,
    trace: Tensor | None,
    num_queries: Tensor,
    num_keys: Tensor,
    slopes: Tensor,
    energies: Tensor,
    averaged: bool,
    lambda_squared: bool,
    d_mean: Tensor,
    half: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of both Gram matrices, of both weights, of Lambda and of the trace."""
    B, H, P, S, block, tile = _sizes(gram_q, w_e)
    d_grams, d_weights = gram_q.new_empty(2, B, H, P, P), gram_q.new_empty(2, B, H, P, S)
    d_lambda = gram_q.new_empty(H, S)
    d_trace = gram_q.new_empty(0 if trace is None else H)
    w_e, w_r = _readable(w_e), _readable(w_r)
    blocks = -(-P // block)
    with device_of(gram_q):
        gradient_blocks[(4 * (B + 1) * H, blocks)](
            *contiguous(gram_q, gram_k), w_e, w_r,
            *contiguous(lambda_diag, num_queries, num_keys), slopes, energies, d_mean,
            d_grams, d_weights, d_lambda, None if trace is None else d_trace,
            _strides(w_e), _strides(w_r), B, H, P, S,
            averaged, lambda_squared, trace is None, block, tile, _precision(half),
            num_warps=warps_of(4 * B * H * blocks),
        )  # fmt: skip
    if w_e.ndim == 3 and B > 1:
        totals = gram_q.new_empty(2, H, P, S)
        add_up(*zip(d_weights, totals, strict=True))
        return d_grams, totals, d_lambda, d_trace
    return d_grams, d_weights if w_e.ndim == 4 else d_weights[:, 0], d_lambda, d_trace


def _precision(half: bool) -> str:
    """Of the products: Gram matrices of tokens in half precision carry larger errors already."""
    return PRODUCTS[torch.bfloat16 if half else torch.float32]


def _sizes(gram_q: Tensor, w_e: Tensor) -> tuple[int, int, int, int, int, int]:
    """B, H, P and S, rows of a block and directions of a tile."""
    (B, H, P, _), S = gram_q.shape, w_e.shape[-1]
    return B, H, P, S, min(_BLOCK, padded(P)), min(_TILE, padded(S))


def _readable(w: Tensor) -> Tensor:
    """The weights, copied where a matrix [P, S] has gaps."""
    return w if w.stride()[-2:] == (w.shape[-1], 1) else w.contiguous()


def _strides(w: Tensor) -> tuple[int, int]:
    """How far sequences and heads of the weights [B, H, P, S] lie apart; 0 for [H, P, S]."""
    return (w.stride(0) if w.ndim == 4 else 0), w.stride(-3)
