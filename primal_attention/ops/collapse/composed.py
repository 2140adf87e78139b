r"""A_e = W_{e|X} C_e and A_r = W_{r|X} C_r as one op: $dW = dA\,C^\top$ and $dC = \sum W^\top dA$.

Letters: B batch, H heads, C head dim, P feature dim, S directions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.op import Op
from primal_attention.precision import accumulate, accumulation_dtype, exact


def collapse(
    w_e: Tensor,  # [B, H, P, S] or [H, P, S]
    w_r: Tensor,
    c_e: Tensor | None,  # [S, C]; None where e is not output
    c_r: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """A_e and A_r, [B, H, P, C] or [H, P, C], in the accumulation dtype; None where not output."""
    if w_e.is_cuda and w_e.shape == w_r.shape:
        a_e, a_r = _forward(w_e, w_r, c_e, c_r)
    else:  # where calling an op costs more than its arithmetic
        a_e, a_r = collapse_composed(w_e, w_r, c_e, c_r)
    return None if c_e is None else a_e, None if c_r is None else a_r


@exact
def collapse_composed(
    w_e: Tensor, w_r: Tensor, c_e: Tensor | None, c_r: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A_e and A_r; empty where they are not wanted."""
    a_e, a_r = (
        w.new_empty(0, dtype=accumulation_dtype(w.dtype)) if c is None else _product(w, c)
        for w, c in ((w_e, c_e), (w_r, c_r))
    )
    return a_e, a_r


def _product(w: Tensor, c: Tensor) -> Tensor:
    return accumulate(w) @ accumulate(c)


def _empty_outputs(
    w_e: Tensor, w_r: Tensor, c_e: Tensor | None, c_r: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(w_e.dtype)
    a_e, a_r = (
        w.new_empty(0 if c is None else (*w.shape[:-1], c.shape[1]), dtype=dtype)
        for w, c in ((w_e, c_e), (w_r, c_r))
    )
    return a_e, a_r


@exact
def collapse_backward(
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w_e, w_r, c_e and c_r; empty where there is no such input."""
    dw_e, dc_e = side_backward(w_e, c_e, None, da_e)
    dw_r, dc_r = side_backward(w_r, c_r, None, da_r)
    return dw_e, dw_r, dc_e, dc_r


def side_backward(
    w: Tensor, c: Tensor | None, d_w: Tensor | None, da: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of W, by its other uses too, and of C; empty where there is no such input."""
    total = torch.zeros(w.shape, dtype=w.dtype, device=w.device) if d_w is None else d_w
    if c is None or da is None:
        return w.new_empty(w.shape).copy_(total), _like(w, c).zero_()
    da = accumulate(da)
    total = total + da @ accumulate(c).mT
    dc = accumulate(w).flatten(0, -2).mT @ da.flatten(0, -2)
    return total.to(w.dtype), _like(w, c).copy_(dc)


def _like(w: Tensor, c: Tensor | None) -> Tensor:
    return w.new_empty(0) if c is None else torch.empty_like(c)


def _empty_gradients(
    w_e: Tensor, w_r: Tensor, c_e: Tensor | None, c_r: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return w_e.new_empty(w_e.shape), w_r.new_empty(w_r.shape), _like(w_e, c_e), _like(w_r, c_r)


def _save(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    d_outputs = tuple(None if d is None or not d.numel() else d for d in d_outputs)
    if are_differentiated():
        return tuple(differentiable_gradients(collapse_composed, tensors, d_outputs))
    computed = _backward(*tensors, *d_outputs)
    return tuple(None if x is None else d for x, d in zip(tensors, computed, strict=True))


_forward = Op(
    "collapse_forward",
    collapse_composed,
    _empty_outputs,
    fused="primal_attention.ops.collapse.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=collapse_composed,
)
_backward = Op(
    "collapse_backward",
    collapse_backward,
    _empty_gradients,
    fused="primal_attention.ops.collapse.triton.backward",
    backward_of=(collapse_composed, lambda *t: Call(t[:4], t[4:])),
)
