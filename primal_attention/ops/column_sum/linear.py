r"""y = x W^T + b with its own backward pass: $dx = dy\,W$, $dW = dy^\top x$, $db = \sum dy$.

Letters: D columns of x, E columns of y.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.op import Op
from primal_attention.ops.products import affine
from primal_attention.precision import exact


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same as ``torch.nn.functional.linear`` of x [..., D], weight [E, D] and bias [E]."""
    y: Tensor = _forward(x, weight, bias)
    return y


@exact
def forward_composed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Y [..., E]."""
    return affine(x, weight, bias)


def _empty_output(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@exact
def backward_composed(
    x: Tensor, weight: Tensor, d_y: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; the first two are empty where they are not wanted."""
    rows = d_y.reshape(-1, d_y.shape[-1])
    return *products(x, weight, rows, of_x=of_x, of_weight=of_weight), rows.sum(0)


def products(
    x: Tensor, weight: Tensor, rows: Tensor, *, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight; empty where they are not wanted."""
    dx = affine(rows, weight.mT).view(x.shape) if of_x else x.new_empty(0)
    return dx, rows.mT @ x.reshape(-1, x.shape[-1]) if of_weight else x.new_empty(0)


def _empty_gradients(
    x: Tensor, weight: Tensor, d_y: Tensor, of_x: bool, of_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dx = x.new_empty(x.shape if of_x else 0)
    return dx, x.new_empty(weight.shape if of_weight else 0), x.new_empty(weight.shape[0])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias = ctx.saved_tensors
    if are_differentiated():
        inputs = x, weight, bias
        return tuple(differentiable_gradients(lambda *t: [_composition(*t)], inputs, [d_y]))
    wanted = ctx.needs_input_grad
    grads = _backward(x, weight, d_y, *wanted[:2])
    return tuple(grad if wants else None for wants, grad in zip(wanted, grads, strict=True))


@exact
def _composition(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


_forward = Op(
    "linear_forward",
    forward_composed,
    _empty_output,
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "linear_backward",
    backward_composed,
    _empty_gradients,
    fused="primal_attention.ops.column_sum.triton.backward",
    backward_of=(_composition, lambda *t: Call((*t[:2], None), t[2:3], t[3:])),
)
