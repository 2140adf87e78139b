"""Gradients inside one piece of the sequence.

Letters: B batch, H heads, C head dim, P feature dim, n tokens of a piece.
"""

from __future__ import annotations

from torch import Tensor

from primal_attention.ops.chunks import Scratch, add_product, mask_of, zeroed


def twice(d_gram: Tensor | None) -> Tensor | None:
    """The gradient of a Gram matrix by both of its factors."""
    return None if d_gram is None else d_gram + d_gram.mT


def d_outputs(d_out: Tensor, piece: slice, token_mask: Tensor | None, scratch: Scratch) -> Tensor:
    """Gradient of a piece of the outputs, [B, H, n, C], zero at padded tokens."""
    given = d_out[:, piece].transpose(1, 2)
    return zeroed(scratch.room("d_piece", *given.shape).copy_(given), mask_of(token_mask, piece))


def d_features(
    phi: Tensor,
    a: Tensor | None,
    dy: Tensor | None,
    both: Tensor | None,  # dG + dG^T
    da: Tensor,
    scratch: Scratch,
) -> Tensor:
    """Gradient of the features of one piece, [B, H, n, P]; adds to that of the projection, da."""
    if both is None:
        d_phi = scratch.room("d_phi", *phi.shape).zero_()
    else:
        d_phi = scratch.product("d_phi", phi, both)
    if a is not None and dy is not None:
        add_product(da, phi.mT, dy)
        add_product(d_phi, dy, a.mT)
    return d_phi
