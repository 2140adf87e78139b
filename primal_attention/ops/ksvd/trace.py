r"""Tr(W_e^T W_r) of each head as one op: $dW_e = d\, W_r$ and $dW_r = d\, W_e$.

Letters: H heads, M rows, S directions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops.gradients import are_differentiated
from primal_attention.ops.op import Op
from primal_attention.precision import accumulate, accumulation_dtype, exact


def trace(w_e: Tensor, w_r: Tensor) -> Tensor:
    """Tr(W_e^T W_r), [H], of the parameters w_e, w_r [H, M, S], in the accumulation dtype."""
    if not w_e.is_cuda:  # where calling an op costs more than its arithmetic
        return forward_composed(w_e, w_r)
    result: Tensor = _forward(w_e, w_r)
    return result


@exact
def forward_composed(w_e: Tensor, w_r: Tensor) -> Tensor:
    """The traces, [H]."""
    return (accumulate(w_e) * accumulate(w_r)).sum((-2, -1))


def _empty_output(w_e: Tensor, w_r: Tensor) -> Tensor:
    return w_e.new_empty(w_e.shape[0], dtype=accumulation_dtype(w_e.dtype))


@exact
def backward_composed(w_e: Tensor, w_r: Tensor, d_trace: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of w_e and of w_r."""
    d = d_trace[:, None, None]
    return (d * w_r).to(w_e.dtype).contiguous(), (d * w_e).to(w_r.dtype).contiguous()


def _empty_gradients(w_e: Tensor, w_r: Tensor, d_trace: Tensor) -> tuple[Tensor, Tensor]:
    return w_e.new_empty(w_e.shape), w_r.new_empty(w_r.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d_trace: Tensor) -> tuple[Tensor, Tensor]:
    w_e, w_r = ctx.saved_tensors
    if are_differentiated():
        return backward_composed(w_e, w_r, d_trace)
    grads: tuple[Tensor, Tensor] = _backward(w_e, w_r, d_trace)
    return grads


_forward = Op(
    "trace_forward",
    forward_composed,
    _empty_output,
    fused="primal_attention.ops.ksvd.triton_trace.forward",
    gradients=_gradients,
    save=_save,
    composition=forward_composed,
)
_backward = Op(
    "trace_backward",
    backward_composed,
    _empty_gradients,
    fused="primal_attention.ops.ksvd.triton_trace.backward",
)
