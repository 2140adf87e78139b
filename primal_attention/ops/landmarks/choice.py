"""Which tokens are landmarks, and their rows.

All of it is tensor arithmetic on the input's device, without a look at the values from the host.

Letters: B batch, N tokens, D model dim, M landmarks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.op import Op


class Landmarks(NamedTuple):
    """Which tokens of x are landmarks; X' itself is built where it is asked for."""

    x: Tensor  # [B, N, D]
    positions: Tensor  # [B, M]; -1 where there is none, whose row is zero
    scale: float = 1.0  # of all rows

    def rows(self) -> Tensor:
        """X' [B, M, D]."""
        B, N, D = self.x.shape
        first = torch.arange(0, B * N, N, device=self.x.device)[:, None]
        tokens = (self.positions.clamp(min=0) + first).flatten()
        rows = self.x.reshape(B * N, D).index_select(0, tokens).view(*self.positions.shape, D)
        rows = torch.where((self.positions >= 0)[:, :, None], rows, 0.0)
        return rows if self.scale == 1.0 else rows * self.scale


def landmarks(
    x: Tensor,  # [B, N, D]
    num_landmarks: int,
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token; holes are allowed
    dropout: float = 0.0,
    jitter: float = 0.0,
) -> Tensor:
    """X' [B, M, D] of the landmarks that :func:`choose_landmarks` takes."""
    options: dict[str, Any] = {"token_mask": token_mask, "dropout": dropout, "jitter": jitter}
    return choose_landmarks(x, num_landmarks, **options).rows()


def choose_landmarks(
    x: Tensor,  # [B, N, D]
    num_landmarks: int,
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token; holes are allowed
    dropout: float = 0.0,
    jitter: float = 0.0,
) -> Landmarks:
    """The landmarks of each sequence; one without a real token has none.

    Landmark i of M stands at real token i (n-1) // max(M-1, 1) of n, in integer arithmetic: the
    first and the last are always in, and tokens repeat where n < M. ``jitter`` moves each one by a
    whole number of tokens, uniformly within so many landmark spacings; ``dropout`` drops whole
    landmarks and scales the rest up. Both are drawn for each sequence and landmark.
    """
    moves, drops = (
        torch.rand(x.shape[0], num_landmarks, device=x.device) if share > 0 else None
        for share in (jitter, dropout)
    )
    index = _index(x.detach(), token_mask, moves, drops, num_landmarks, jitter, dropout)
    return Landmarks(x, index, 1.0 / (1.0 - dropout))


def landmark_index(
    x: Tensor,
    token_mask: Tensor | None,
    moves: Tensor | None,  # [B, M], uniform in [0, 1): how far each landmark is moved
    drops: Tensor | None,  # [B, M], uniform in [0, 1): those below the dropout are dropped
    num_landmarks: int,
    jitter: float,
    dropout: float,
) -> Tensor:
    """The position of each landmark, [B, M]; -1 where there is none."""
    num_tokens = _num_tokens(x, token_mask)  # [B]
    order = landmark_order(num_tokens, num_landmarks)  # [B, M]
    if moves is not None:
        order = _jittered(order, num_tokens, moves, jitter)
    index = _token_of(order, token_mask)
    if token_mask is not None:
        index = torch.where((num_tokens > 0)[:, None], index, -1)
    return index if drops is None else torch.where(drops >= dropout, index, -1)


def _num_tokens(x: Tensor, token_mask: Tensor | None) -> Tensor:
    if token_mask is None:
        return torch.full((x.shape[0],), x.shape[1], device=x.device)
    return token_mask.sum(1)


def landmark_order(num_tokens: Tensor, num_landmarks: int) -> Tensor:
    """Which of the n real tokens each landmark is, counted from 0, [B, M]."""
    i = torch.arange(num_landmarks, device=num_tokens.device)
    last = (num_tokens - 1).clamp(min=0)
    return i * last[:, None] // max(num_landmarks - 1, 1)


def _jittered(order: Tensor, num_tokens: Tensor, moves: Tensor, jitter: float) -> Tensor:
    last = (num_tokens - 1).clamp(min=0)[:, None]
    spacing = last / max(order.shape[1] - 1, 1)
    offset = (2.0 * moves - 1.0) * jitter * spacing
    return (order + offset.round().long()).clamp(min=0).minimum(last)


def _token_of(order: Tensor, token_mask: Tensor | None) -> Tensor:
    """Position in the sequence of each real token, counted among the real ones."""
    if token_mask is None:
        return order
    seen = token_mask.cumsum(1)  # [B, N], non-decreasing
    return torch.searchsorted(seen, order + 1).clamp(max=token_mask.shape[1] - 1)


def _empty_index(
    x: Tensor,
    token_mask: Tensor | None,
    moves: Tensor | None,
    drops: Tensor | None,
    num_landmarks: int,
    *options: Any,
) -> Tensor:
    return x.new_empty((x.shape[0], num_landmarks), dtype=torch.long)


_index = Op(
    "landmark_index",
    landmark_index,
    _empty_index,
    fused="primal_attention.ops.landmarks.triton.landmark_index",
    composition=landmark_index,
)
