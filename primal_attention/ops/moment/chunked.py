r"""The moment in pieces: phi is recomputed in the backward pass, z and the values are kept.

With $M = \sum_i \phi_i h_i^\top$: $d\phi_i = dM\, h_i$ and $dh_i = dM^\top \phi_i$.

Letters: B batch, N tokens, H heads, C head dim, P features, S values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.chunks import (
    Scratch,
    add_product,
    head_first,
    mask_of,
    token_chunks,
    zeroed,
)
from primal_attention.ops.features import features_of
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import are_differentiated, differentiable_gradients
from primal_attention.ops.moment import reference
from primal_attention.ops.op import Op
from primal_attention.precision import accumulation_dtype, exact


def moment(
    z: Tensor,  # [B, N, H, C]
    values: Tensor,  # [B, N, H, S]
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    feature_map: str = "cosine",
) -> Tensor:
    """The same values as the reference, [B, H, P, S]."""
    result: Tensor = _forward(z, values, token_mask, feature_map)
    return result


@exact
def forward_in_pieces(
    z: Tensor, values: Tensor, token_mask: Tensor | None, feature_map: str
) -> Tensor:
    """The moment, [B, H, P, S]."""
    total, scratch = _empty_output(z, values).zero_(), Scratch(z)
    for piece in token_chunks(z):
        mask = mask_of(token_mask, piece)
        phi = features_of(z, piece, token_mask, feature_map, scratch).phi
        add_product(total, phi.mT, zeroed(head_first(values, piece), mask))
    return total


def _empty_output(z: Tensor, values: Tensor, *options: Any) -> Tensor:
    B, _, H, P = z.shape
    return z.new_empty((B, H, P, values.shape[-1]), dtype=accumulation_dtype(z.dtype))


@exact
def backward_in_pieces(
    z: Tensor, values: Tensor, token_mask: Tensor | None, feature_map: str, d_moment: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of z and of the values."""
    dz, d_values = _empty_gradients(z, values)
    add_gradients(z, values, token_mask, feature_map, d_moment, dz.zero_(), d_values)
    return dz, d_values


def add_gradients(
    z: Tensor,
    values: Tensor,
    token_mask: Tensor | None,
    feature_map: str,
    d_moment: Tensor,
    dz: Tensor,  # added to
    d_values: Tensor,  # written
) -> None:
    """Add the gradient of z to another, and write that of the values."""
    scratch = Scratch(z)
    for piece in token_chunks(z):
        features = features_of(z, piece, token_mask, feature_map, scratch)
        d_values[:, piece] = scratch.product("d_values", features.phi, d_moment).transpose(1, 2)
        d_piece = zeroed(head_first(values, piece), mask_of(token_mask, piece))
        d_phi = scratch.product("d_phi", d_piece, d_moment.mT)
        by_moment = scratch.room("dz", *z[:, piece].shape)
        features.pull_back(d_phi, by_moment, scratch)
        dz[:, piece] += by_moment


def _empty_gradients(z: Tensor, values: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), torch.empty_like(values)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.feature_map = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_moment: Tensor) -> tuple[Tensor | None, ...]:
    z, values, token_mask = ctx.saved_tensors
    if are_differentiated():
        grads = differentiable_gradients(
            lambda z, values: [_composition(z, values, token_mask, ctx.feature_map)],
            [z, values],
            [d_moment],
        )
        return (*grads, None, None)
    return (*_backward(z, values, token_mask, ctx.feature_map, d_moment), None, None)


def _composition(z: Tensor, values: Tensor, token_mask: Tensor | None, feature_map: str) -> Tensor:
    return reference.moment(z, values, token_mask=token_mask, feature_map=feature_map)


_forward = Op(
    "moment_forward",
    forward_in_pieces,
    _empty_output,
    fused="primal_attention.ops.moment.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "moment_backward",
    backward_in_pieces,
    _empty_gradients,
    fused="primal_attention.ops.moment.triton.backward",
    backward_of=(_composition, lambda *t: Call(t[:4], t[4:])),
)
