"""The trace of the parameters as fused ops. Letters: H heads, M rows, S directions."""

from __future__ import annotations

import torch
from torch import Tensor

from primal_attention.ops.gpu import device_of
from primal_attention.ops.ksvd.triton_blocks import trace_blocks, trace_gradient_blocks
from primal_attention.ops.triton_launch import DOTS, contiguous

_BLOCK = 4096  # numbers


def takes(w_e: Tensor, w_r: Tensor, *rest: Tensor) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    return w_e.dtype in DOTS and w_r.dtype in DOTS and w_e.numel() > 0


def forward(w_e: Tensor, w_r: Tensor) -> Tensor:
    """The traces, [H]."""
    trace = w_e.new_empty(len(w_e), dtype=torch.float32)
    with device_of(w_e):
        trace_blocks[(len(w_e),)](*contiguous(w_e, w_r), trace, w_e[0].numel(), _BLOCK, num_warps=8)
    return trace


def backward(w_e: Tensor, w_r: Tensor, d_trace: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of w_e and of w_r."""
    dw_e, dw_r = w_e.new_empty(w_e.shape), w_r.new_empty(w_r.shape)
    number = w_e[0].numel()
    with device_of(w_e):
        trace_gradient_blocks[(len(w_e), -(-number // _BLOCK))](
            *contiguous(w_e, w_r, d_trace), dw_e, dw_r, number, _BLOCK, num_warps=8
        )
    return dw_e, dw_r
