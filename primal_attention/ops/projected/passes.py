"""The passes that the op is composed of, and their composition in both directions.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.collapse.composed import collapse_composed, side_backward
from primal_attention.ops.primal.chunked import forward_in_pieces, write_gradients
from primal_attention.ops.products import affine
from primal_attention.ops.projected.frame import given_or_empty, projection_gradients
from primal_attention.ops.running_mean import chunked as running_mean
from primal_attention.ops.running_mean import token_counts
from primal_attention.ops.sampled import composed as sampled
from primal_attention.precision import accumulation_dtype, operand_dtype


class Passes(NamedTuple):
    """One way to compute them."""

    counts: Callable[[Tensor, Tensor | None], Tensor | None]  # of the real tokens up to each
    weights: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]  # W_e, W_r, A_e and A_r
    attend: Callable[..., tuple[Tensor, Tensor, Tensor]]  # outputs and Gram matrices
    write_gradients: Callable[..., None]  # of queries, keys, A_e, A_r and bias
    column_sum: Callable[[Tensor], Tensor]  # of the gradients of what was projected
    add_gradients: Callable[..., tuple[Tensor, ...]]  # of what the weights are made of
    means: Callable[..., tuple[Tensor, Tensor]]  # over the tokens up to each
    # Of queries and keys before the means, with their column sum; the others are written.
    mean_gradients: Callable[..., tuple[Tensor, Tensor]]
    # Whether the gradients of q, k, A_e and A_r may be written over these.
    takes_places: Callable[[Tensor, Tensor | None, Tensor | None], bool]


def compose_forward(
    passes: Passes,
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The five outputs; then what the backward pass needs: queries and keys, A_e, A_r."""
    rows = affine(x, weight, shift)
    qk = torch.unflatten(rows, -1, (2, w_e.shape[0], -1))  # [B, N, 2, H, P]
    if causal:
        z = qk.flatten(2, 3)  # side by side they are heads of one tensor
        means, _ = passes.means(z, None, passes.counts(z, token_mask), token_mask)
        qk = means.view(qk.shape)
    e, r, a_e, a_r = passes.weights(x, index, w_e, w_r, c_e, c_r, scale)
    sides = given_side(a_e, c_e), given_side(a_r, c_r)
    out, gram_q, gram_k = passes.attend(*qk.unbind(2), *sides, bias, token_mask, *options)
    return out, gram_q, gram_k, e, r, qk, a_e, a_r


def given_side(a: Tensor, c: Tensor | None) -> Tensor | None:
    """A_e or A_r; None where its side is not output."""
    return None if c is None else a


def compose_backward(
    passes: Passes,
    x: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    bias: Tensor | None,
    index: Tensor | None,
    scale: float,
    causal: bool,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    e: Tensor,
    r: Tensor,
    qk: Tensor,
    a_e: Tensor,
    a_r: Tensor,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_e: Tensor | None,
    d_r: Tensor | None,
    of_x: bool,
    of_weight: bool,
    spent: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first eight inputs; empty where they are not given or not wanted.

    Those of q, k, A_e and A_r are written over them where these are spent and the passes can.
    """
    sides = given_side(a_e, c_e), given_side(a_r, c_r)
    over = spent and passes.takes_places(qk, *sides)
    d_qk = qk if over else torch.empty_like(qk)
    da_e, da_r = (a if over and a is not None else empty_like(qk, a) for a in sides)
    d_bias = empty_like(qk, bias)
    given = *qk.unbind(2), *sides, bias, token_mask, map_q, map_k, d_out, d_gram_q, d_gram_k
    d_shift: Tensor | None
    if causal:
        d_rows, d_shift = passes.mean_gradients(*given, d_qk, (da_e, da_r, d_bias))
    else:
        passes.write_gradients(*given, (*d_qk.unbind(2), da_e, da_r, d_bias))
        d_rows = d_qk.flatten(2)
        d_shift = None if shift is None else passes.column_sum(d_rows.flatten(0, 1))
    dx, d_weight = projection_gradients(x, weight, d_rows, of_x=of_x, of_weight=of_weight)
    d_sides = (used(d_out, da_e, c_e), used(d_out, da_r, c_r))
    dw_e, dw_r, dc_e, dc_r = passes.add_gradients(
        x, index, w_e, w_r, c_e, c_r, scale, e, r, d_e, d_r, *d_sides, dx
    )  # fmt: skip
    given_shift = None if shift is None else d_shift
    d_x, d_w, d_b = given_or_empty(x, dx, d_weight, given_shift)
    return d_x, d_w, d_b, dw_e, dw_r, dc_e, dc_r, d_bias


def empty_like(z: Tensor, tensor: Tensor | None) -> Tensor:
    """An unwritten tensor of the same shape, or an empty one for None."""
    return z.new_empty(0) if tensor is None else torch.empty_like(tensor)


def used(d_out: Tensor | None, da: Tensor, c: Tensor | None) -> Tensor | None:
    """The gradient of A; None where there is none."""
    return None if d_out is None or c is None else da


def weights_in_pieces(
    x: Tensor,
    index: Tensor | None,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e, W_r, A_e and A_r; empty where they are not wanted."""
    if index is not None:
        e, r, a_e, a_r = sampled.forward_composed(x, index, w_e, w_r, c_e, c_r, scale)
        return e, r, as_operand(a_e, c_e, x.dtype), as_operand(a_r, c_r, x.dtype)
    e, r = (w.new_empty(w.shape, dtype=accumulation_dtype(w.dtype)).copy_(w) for w in (w_e, w_r))
    return e, r, *collapse_composed(e, r, c_e, c_r)


def as_operand(a: Tensor, c: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A_e or A_r of one sequence as it is kept; as it is where its side is not output."""
    return a if c is None else a.to(operand_dtype(dtype, a.dtype))


def column_sum_in_pieces(rows: Tensor) -> Tensor:
    """The sum over the rows of a matrix."""
    return rows.sum(0)


def mean_gradients_in_pieces(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    *rest: Any,  # maps, gradients of the outputs, room for those of the means, and for the others
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys before the means, side by side, and their column sum."""
    map_q, map_k, d_out, d_gram_q, d_gram_k, d_means, others = rest
    grads = *d_means.unbind(2), *others
    d_outputs = d_out, d_gram_q, d_gram_k
    write_gradients(q, k, a_e, a_r, bias, token_mask, map_q, map_k, *d_outputs, grads)
    d_z = d_means.flatten(2, 3)
    counts = token_counts(d_z, token_mask, None)
    dz, _ = running_mean.backward_in_pieces(d_z, None, counts, token_mask)
    return dz.flatten(2), column_sum_in_pieces(dz.flatten(2).flatten(0, 1))


def add_gradients_in_pieces(
    x: Tensor,
    index: Tensor | None,
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
    dx: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of w_e, w_r, c_e and c_r; that of x by the landmarks is added to dx."""
    if index is not None:
        given = e, r, d_e, d_r, da_e, da_r
        return sampled.add_gradients(x, index, w_e, w_r, c_e, c_r, scale, *given, dx)
    dw_e, dc_e = side_backward(w_e, c_e, d_e, da_e)
    dw_r, dc_r = side_backward(w_r, c_r, d_r, da_r)
    return dw_e, dw_r, dc_e, dc_r


def takes_no_places(*tensors: Any) -> bool:
    """Pieces are read again after others were written."""
    return False


IN_PIECES = Passes(
    partial(token_counts, before=None),
    weights_in_pieces,
    forward_in_pieces,
    write_gradients,
    column_sum_in_pieces,
    add_gradients_in_pieces,
    running_mean.forward_in_pieces,
    mean_gradients_in_pieces,
    takes_no_places,
)
