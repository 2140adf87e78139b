r"""Sampled weights of short sequences, whose tokens are landmarks more than once.

With U the matrix of ones where landmark m is token n, X' = U X, so that

    W = X'^T w = X^T (U^T w)        dw = U (X \bar W)        dX = (U^T w) \bar W^T

and the products go over the tokens instead of over the landmarks, of which there are more.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, M landmarks, S columns of w.
"""

from __future__ import annotations

import torch
from torch import Tensor

from primal_attention.precision import accumulate


def is_by_token(x: Tensor, index: Tensor) -> bool:
    """Whether there are fewer tokens than landmarks; for a CPU alone."""
    return x.is_cpu and x.shape[1] < index.shape[1]


def weights_by_token(x: Tensor, index: Tensor, w: Tensor) -> Tensor:
    """W [B, H, P, S] of tokens x [B, N, D], landmarks at index [B, M], and w [H, M, S]."""
    chosen = _chosen(x, index)
    return _heads(x, chosen, len(w)).mT @ _added_up(chosen, w)


def add_gradients_by_token(
    x: Tensor, index: Tensor, w: Tensor, d_w_given_x: Tensor, dx: Tensor | None
) -> Tensor:
    """The gradient of w, from that of W [B, H, P, S]; that of x is added to dx [B, N, D]."""
    chosen = _chosen(x, index)
    d_added_up = _heads(x, chosen, len(w)) @ d_w_given_x  # [B, H, N, S]
    if len(chosen) < len(x):
        d_added_up = d_added_up.sum(0, keepdim=True)
    rows = d_added_up.transpose(1, 2).flatten(0, 1).flatten(1)  # [B N, H S]
    dw = torch.unflatten(chosen.flatten(0, 1).mT @ rows, 1, (len(w), -1)).transpose(0, 1)
    if dx is not None:
        d_rows = (_added_up(chosen, w) @ d_w_given_x.mT).transpose(1, 2).flatten(2)
        dx += d_rows.to(dx.dtype)
    return dw


def _chosen(x: Tensor, index: Tensor) -> Tensor:
    """U^T [B, N, M], in the accumulation dtype; [1, N, M] where all sequences have the same."""
    if len(index) > 1 and torch.equal(index, index[:1].expand_as(index)):
        index = index[:1]
    tokens = torch.arange(x.shape[1])[:, None]
    return accumulate((index[:, None] == tokens).to(x.dtype))


def _heads(x: Tensor, chosen: Tensor, num_heads: int) -> Tensor:
    """X [B, H, N, P], zero at tokens that are no landmark."""
    used = torch.where(chosen.any(2)[:, :, None], accumulate(x), 0.0)
    return torch.unflatten(used, 2, (num_heads, -1)).transpose(1, 2)


def _added_up(chosen: Tensor, w: Tensor) -> Tensor:
    """U^T w [B, H, N, S], or of all sequences [1, H, N, S]."""
    H, M, S = w.shape
    rows = chosen @ accumulate(w).transpose(0, 1).reshape(M, H * S)
    return torch.unflatten(rows, 2, (H, S)).transpose(1, 2)
