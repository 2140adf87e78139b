"""The fused passes of Primal-Attention over the blocks of one sequence and head, for narrow heads.

Everything of one head fits the registers of a program: the projections A_e, A_r, and the sums that
grow along the tokens. The sums of a program are written apart and added up afterwards, in the same
order every time.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, n tokens of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from primal_attention.ops.triton_maps import (
    features,
    largest,
    load_matrix,
    load_rows,
    masked_rows,
    product,
    pull_back,
    real_tokens,
    store_matrix,
    store_rows,
)


@triton.jit
def sequence_of(tensor, strides, b, h):
    """Pointer to the first token of sequence b and head h of a tensor [B, N, H, C]."""
    return tensor + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2]


@triton.jit
def forward_blocks(
    q, k, a_e, a_r, bias, mask, out, gram_q, gram_k,
    q_strides, k_strides, out_strides, a_stride, mask_stride,
    N, H, splits, tokens,
    P: tl.constexpr, C: tl.constexpr, MAP_Q: tl.constexpr, MAP_K: tl.constexpr, DOT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out = phi_q A_e + phi_k A_r + bias, and the sums of phi_q phi_q^T and phi_k phi_k^T."""
    program = tl.program_id(0)
    h, b = program % H, program // H // splits
    first = (program // H % splits) * tokens
    last = tl.minimum(first + tokens, N)
    q = sequence_of(q, q_strides, b, h)
    k = sequence_of(k, k_strides, b, h) if k is not None else None
    mask = mask + b.to(tl.int64) * mask_stride if mask is not None else None
    matrix = b.to(tl.int64) * a_stride + h * (P * C)

    scale = tl.full([], 1.0, tl.float32)
    if a_e is not None:
        a_e = load_matrix(a_e + matrix, P, C, BLOCK_P, BLOCK_C)
        scale = largest(a_e, DOT)
    if a_r is not None:
        a_r = load_matrix(a_r + matrix, P, C, BLOCK_P, BLOCK_C)
        ...
