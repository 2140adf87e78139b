r"""Sampled weights composed of a few products, with their own backward pass.

X' is gathered once in each direction and never kept. With $\bar W_e = dW_e + dA_e C_e^\top$:

    dX' = w_e \bar W_e^T + w_r \bar W_r^T      dw_e = X' \bar W_e      dC_e = W_e^T dA_e

and dX' is added up at the tokens that the landmarks came from.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from primal_attention.ops.collapse.composed import side_backward
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.landmarks import Landmarks
from primal_attention.ops.op import Op
from primal_attention.ops.sampled import reference
from primal_attention.ops.sampled.by_token import (
    add_gradients_by_token,
    is_by_token,
    weights_by_token,
)
from primal_attention.ops.sampled.reference import SampledWeights
from primal_attention.precision import accumulate, accumulation_dtype, exact


def sampled_weights(
    x: Tensor,  # [B, N, D] with D = H P
    index: Tensor,  # [B, M], the positions of the landmarks; -1 for a row of zeros
    w_e: Tensor,  # [H, M, S]
    w_r: Tensor,
    c_e: Tensor | None,  # [S, C]: the output map's part for e; None where e is not output
    c_r: Tensor | None,
    scale: float = 1.0,
) -> SampledWeights:
    """The same values as the reference."""
    e, r, a_e, a_r = _forward(x, index, w_e, w_r, c_e, c_r, scale)
    return SampledWeights(e, r, None if c_e is None else a_e, None if c_r is None else a_r)


@exact
def forward_composed(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e, W_r, A_e and A_r; empty where they are not wanted."""
    w = torch.cat((w_e, w_r), -1)
    if is_by_token(x, index):
        both = weights_by_token(x, index, w).transpose(0, 1)
    else:
        x_sampled = _by_head(x, index, w)
        both = einsum(x_sampled, w.to(x_sampled), "b h m p, h m s -> h b p s")
    e, r = (_batch_first(side) for side in both.mul_(scale).chunk(2, -1))
    a_e, a_r = (x.new_empty(0) if c is None else w @ c.to(w) for w, c in ((e, c_e), (r, c_r)))
    return e, r, a_e, a_r


def _batch_first(side: Tensor) -> Tensor:
    return side.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _by_head(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    rows = Landmarks(x, index).rows()
    return accumulate(rearrange(rows, "b m (h p) -> b h m p", h=w.shape[0]))


def _empty_outputs(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, _, D = x.shape
    H, _, S = w_e.shape
    dtype = accumulation_dtype(x.dtype)
    e, r = (x.new_empty((B, H, D // H, S), dtype=dtype) for _ in range(2))
    a_e, a_r = (
        x.new_empty(0) if c is None else e.new_empty((*e.shape[:3], c.shape[1])) for c in (c_e, c_r)
    )
    return e, r, a_e, a_r


@exact
def backward_composed(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
    e: Tensor,  # W_e and W_r, as the forward pass gave them
    r: Tensor,
    d_e: Tensor | None,
    d_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w_e, w_r, c_e and c_r; empty where there is no such input."""
    dx = torch.zeros_like(x)
    given = e, r, d_e, d_r, da_e, da_r
    return dx, *add_gradients(x, index, w_e, w_r, c_e, c_r, scale, *given, dx)


def add_gradients(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
    e: Tensor,
    r: Tensor,
    d_e: Tensor | None,
    d_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
    dx: Tensor | None,  # [B, N, D]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w_e, w_r, c_e and c_r; that of x is added to the rows of its landmarks."""
    total_e, dc_e = side_backward(e, c_e, d_e, da_e)
    total_r, dc_r = side_backward(r, c_r, d_r, da_r)
    d_both = torch.cat([side.transpose(0, 1) for side in (total_e, total_r)], -1).mul_(scale)
    w = torch.cat((w_e, w_r), -1)
    if is_by_token(x, index):
        dw = add_gradients_by_token(x, index, w, d_both.transpose(0, 1), dx)
    else:
        dw = einsum(_by_head(x, index, w), d_both, "b h m p, h b p s -> h m s")
        if dx is not None:
            d_sampled = einsum(d_both, w.to(d_both), "h b p s, h m s -> h b p m")
            _add_rows(dx, index, rearrange(d_sampled, "h b p m -> b m (h p)"))
    dw_e, dw_r = (w_e.new_empty(w_e.shape).copy_(part) for part in dw.chunk(2, -1))
    return dw_e, dw_r, dc_e, dc_r


def _add_rows(dx: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add each row to the token that its landmark is; tokens may repeat."""
    rows = torch.where((index >= 0)[:, :, None], rows.contiguous(), 0.0)
    B, N, D = dx.shape
    total, index = accumulate(dx), index.clamp(min=0)
    if dx.is_cpu and total.is_contiguous():  # several times as fast
        first = torch.arange(0, B * N, N)[:, None]
        total.view(B * N, D).index_add_(0, (index + first).flatten(), rows.flatten(0, 1))
    else:  # which has no atomic additions on a GPU
        sequences = torch.arange(B, device=dx.device)[:, None]
        total.index_put_((sequences, index), rows, accumulate=True)
    if total is not dx:
        dx.copy_(total)


def _empty_gradients(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    nothing = x.new_empty(0, dtype=accumulation_dtype(x.dtype))
    dc_e, dc_r = (torch.empty_like(nothing if c is None else c) for c in (c_e, c_r))
    return torch.empty_like(x), w_e.new_empty(w_e.shape), w_r.new_empty(w_r.shape), dc_e, dc_r


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[:2])


def _gradients(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
    x, index, *matrices, e, r = ctx.saved_tensors
    d_outputs = tuple(None if d is None or not d.numel() else d for d in d_outputs)
    tensors = [x, *matrices]
    grads: list[Tensor | None]
    if are_differentiated():
        grads = differentiable_gradients(
            lambda x, *matrices: _composition(x, index, *matrices, ctx.scale), tensors, d_outputs
        )
    else:
        computed = _backward(x, index, *matrices, ctx.scale, e, r, *d_outputs)
        grads = [None if t is None else d for t, d in zip(tensors, computed, strict=True)]
    return grads[0], None, *grads[1:], None


def _composition(x: Tensor, *inputs: Any) -> list[Tensor]:
    """The reference, with something in the place of what is missing."""
    result = reference.sampled_weights(x, *inputs)
    return [x.new_empty(0) if each is None else each for each in result]


_forward = Op(
    "sampled_forward",
    forward_composed,
    _empty_outputs,
    fused="primal_attention.ops.sampled.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "sampled_backward",
    backward_composed,
    _empty_gradients,
    fused="primal_attention.ops.sampled.triton.backward",
    backward_of=(_composition, lambda *t: Call(t[:7], t[9:])),
)
