"""The op with fused passes; the products with the projection's matrix are the library's.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.collapse import triton as collapse
from primal_attention.ops.column_sum.triton import column_sum
from primal_attention.ops.launch import Segments, float32, padded
from primal_attention.ops.primal import triton as primal
from primal_attention.ops.projected.passes import (
    Passes,
    add_gradients_in_pieces,
    compose_backward,
    compose_forward,
    weights_in_pieces,
)
from primal_attention.ops.running_mean import triton as running_mean
from primal_attention.ops.sampled import triton as sampled
from primal_attention.ops.triton_launch import DOTS, PRODUCTS
from primal_attention.precision import exact, operand_dtype


def takes(
    x: Tensor, weight: Tensor, shift: Tensor | None, w_e: Tensor, w_r: Tensor, *rest: Any
) -> bool:
    """Whether the attention can be fused; the weights that cannot be are composed."""
    widths = [
        weight.shape[0] // (2 * w_e.shape[0]),
        *(c.shape[1] for c in rest[:2] if c is not None),
    ]
    return x.dtype in DOTS and padded(max(widths)) <= 256 and x.numel() > 0


def weights(
    x: Tensor, index: Tensor | None, w_e: Tensor, w_r: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e, W_r, A_e and A_r; empty where they are not wanted."""
    c_e, c_r, scale = rest
    if index is None and collapse.takes(w_e, w_r, c_e, c_r):
        return collapse.forward_with_weights(w_e, w_r, c_e, c_r, PRODUCTS[x.dtype])
    if index is not None and sampled.takes(x, index, w_e, w_r, c_e, c_r):
        of_a = operand_dtype(x.dtype, torch.float32)
        return sampled.forward(x, index, w_e, w_r, c_e, c_r, scale, of_a)
    return weights_in_pieces(x, index, w_e, w_r, *rest)


def write_gradients(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    by_counts: primal.ByCounts | None = None,
    sums: Tensor | None = None,
) -> None:
    """Write the gradients of q, k, a_e, a_r and bias, as `primal.write_gradients` does."""
    pairs = zip((q, k, a_e, a_r, bias), grads, strict=True)
    written = [None if t is None else grad for t, grad in pairs]
    given = d_out, d_gram_q, d_gram_k
    options = token_mask, map_q, map_k, *given, written, None, by_counts, sums
    primal.write_gradients(q, k, a_e, a_r, *options)


def mean_gradients(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    token_mask: Tensor | None,
    *rest: Any,  # maps, gradients of the outputs, room for those of the means, and for the others
) -> tuple[Tensor, Tensor]:
    """Gradients of queries and keys before the means, side by side, and their column sum.

    The pass that writes the gradients of the means divides them by the number of tokens, where it
    can: rounded once, as they would be anyway, they go into the sums as they are. The range of
    float16 is too short for that. It adds up its shares of them too, which are then the segments of
    the walk that follows.
    """
    *given, d_means, others = rest
    counts, d_z = running_mean.counts_if_masked(q, token_mask), d_means.flatten(2, 3)
    divided = q.dtype != torch.float16 and primal.takes_one_pass(q, a_e, a_r)
    grads = *d_means.unbind(2), *others
    known = _segments_to_sum(q, a_e, a_r, d_z) if divided else None
    by_counts = primal.ByCounts(counts) if divided else None
    options = token_mask, *given, grads, by_counts, known and known[1]
    write_gradients(q, k, a_e, a_r, bias, *options)
    dz, total = running_mean.backward_with_sum(
        d_z, counts, token_mask, divided=divided, known=known
    )
    return dz.flatten(2), total.flatten()


def _segments_to_sum(
    q: Tensor, a_e: Tensor | None, a_r: Tensor | None, d_z: Tensor
) -> running_mean.Known | None:
    """The shares of the pass that writes gradients d_z, and room for their sums."""
    shares = primal.gradient_shares(q, a_e, a_r)
    if shares.splits == 1 or running_mean.is_one_segment(d_z):
        return None
    B, _, *head = d_z.shape
    return Segments(shares.tokens, shares.splits), float32(q, B, shares.splits, *head)


def add_gradients(
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
    given = e, r, d_e, d_r, da_e, da_r
    if index is None and collapse.takes(w_e, w_r, c_e, c_r):
        return collapse.backward(w_e, w_r, c_e, c_r, da_e, da_r, d_e, d_r, PRODUCTS[x.dtype])
    if index is not None and sampled.takes(x, index, w_e, w_r, c_e, c_r):
        d_rows = None if dx is None else torch.unflatten(dx, -1, (w_e.shape[0], -1))
        return sampled.add_gradients(x, index, w_e, w_r, c_e, c_r, scale, *given, d_rows)
    return add_gradients_in_pieces(x, index, w_e, w_r, c_e, c_r, scale, *given, dx)


FUSED = Passes(
    running_mean.counts_if_masked,
    weights,
    primal.forward,
    write_gradients,
    column_sum,
    add_gradients,
    running_mean.forward,
    mean_gradients,
    primal.takes_one_pass,
)


@exact
def forward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Outputs, and what the backward pass needs of their making."""
    return compose_forward(FUSED, x, *rest)


@exact
def backward(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of the first eight inputs; empty where they are not given or not wanted."""
    return compose_backward(FUSED, x, *rest)
