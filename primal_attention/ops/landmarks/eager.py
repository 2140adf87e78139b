r"""Landmarks: which tokens they are, and the weights that are sampled from them.

$W_{e|X} = X'^\top w_e$ and $W_{r|X} = X'^\top w_r$ with the rows X' of the landmarks, without
synchronisation.

Letters: B batch, N tokens, D model dim, H heads, P feature dim, S directions, M landmarks.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.op import fused
from primal_attention.precision import accumulate, without_autocast


class Landmarks(NamedTuple):
    """Positions of landmarks in x; X' is built on demand."""

    x: Tensor  # [B, N, D]
    positions: Tensor  # [B, M]; -1 where there is none, whose row is zero
    scale: float = 1.0  # of all rows

    def rows(self) -> Tensor:
        """X' [B, M, D]."""
        B, N, D = self.x.shape
        first = torch.arange(0, B * N, N, device=self.x.device)[:, None]
        tokens = (self.positions.clamp(min=0) + first).flatten()
        rows = self.x.reshape(B * N, D)
        # On a GPU the gradient of index_select is atomic, and so not the same bits every time.
        rows = rows[tokens] if rows.is_cuda else rows.index_select(0, tokens)
        rows = rows.view(*self.positions.shape, D)
        rows = torch.where((self.positions >= 0)[:, :, None], rows, 0.0)
        return rows if self.scale == 1.0 else rows * self.scale


def choose_landmarks(
    x: Tensor,  # [B, N, D]
    num_landmarks: int,
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token; holes are allowed
    dropout: float = 0.0,
    jitter: float = 0.0,
) -> Landmarks:
    """Choose the landmarks of each sequence; one without a real token has none.

    Landmark i of M stands at real token i (n-1) // max(M-1, 1) of n, in integer arithmetic: the
    first and the last are always in, and tokens repeat where n < M. ``jitter`` moves each one by a
    whole number of tokens, uniformly within so many landmark spacings; ``dropout`` drops whole
    landmarks and scales the rest up. Both are drawn for each sequence and landmark.
    """
    shape, moves, drops = (x.shape[0], num_landmarks), None, None
    if jitter > 0:
        moves = torch.rand(shape, device=x.device)
    if dropout > 0:
        drops = torch.rand(shape, device=x.device)
    given = IndexInputs(x.detach(), token_mask, moves, drops, num_landmarks, jitter, dropout)
    found = fused("landmark_index", given)
    index = landmark_index(given) if found is None else found[0]
    return Landmarks(x, index, 1.0 / (1.0 - dropout))


class IndexInputs(NamedTuple):
    """Inputs that determine the positions of the landmarks."""

    x: Tensor  # [B, N, D], of which the sizes alone
    token_mask: Tensor | None  # [B, N]
    moves: Tensor | None  # [B, M], uniform in [0, 1): how far each landmark is moved
    drops: Tensor | None  # [B, M], uniform in [0, 1): those below the dropout are dropped
    num_landmarks: int
    jitter: float
    dropout: float


def landmark_index(given: IndexInputs) -> Tensor:
    """Compute the position of each landmark, [B, M]; -1 where there is none."""
    x, token_mask, moves, drops, num_landmarks, jitter, dropout = given
    num_tokens = x.shape[1] if token_mask is None else token_mask.sum(1)[:, None]
    index = landmark_numbers(num_tokens, num_landmarks, moves, jitter, x.device)
    index = index.expand(x.shape[0], num_landmarks)
    if token_mask is not None:
        some = token_mask.any(1, keepdim=True)
        index = torch.where(some, real_token_at(token_mask, index), -1)
    return index if drops is None else torch.where(drops >= dropout, index, -1)


def landmark_numbers(
    num_tokens: Tensor | int,  # [B, 1], real ones
    num_landmarks: int,
    moves: Tensor | None,
    jitter: float,
    device: torch.device,
) -> Tensor:
    """Number each landmark among the real tokens, counted from 0; [B, M], or [M] for all."""
    last = (num_tokens - 1).clamp(min=0) if isinstance(num_tokens, Tensor) else num_tokens - 1
    intervals = max(num_landmarks - 1, 1)
    numbers = torch.arange(num_landmarks, device=device) * last // intervals
    if moves is None:
        return numbers
    offset = (2.0 * moves - 1.0) * jitter * (last / intervals)
    return (numbers + offset.round().long()).clamp(min=0).clamp(max=last)


def real_token_at(token_mask: Tensor, numbers: Tensor) -> Tensor:
    """Return the places [B, M] of real tokens, in a mask [B, N], by their numbers."""
    number = token_mask.cumsum(1) - 1  # of each real token, counted from 0
    B, N = token_mask.shape
    places = torch.arange(N, device=token_mask.device).expand(B, N)
    spare = torch.where(token_mask, number, N)  # padded tokens share one more place
    return places.new_zeros(B, N + 1).scatter(1, spare, places).gather(1, numbers)


def sampled_weights(landmarks: Landmarks, parameters: Tensor) -> Tensor:
    """Sample both weights [2, H, B, P, S] by parameters w_e, w_r side by side, [H, M, 2 S]."""
    rows, H = landmarks.rows(), parameters.shape[0]
    B, M, D = rows.shape
    with without_autocast(rows.device):
        by_head = accumulate(rows).view(B, M, H, D // H).permute(2, 0, 3, 1)  # [H, B, P, M]
        by_row = by_head.reshape(H, B * (D // H), M)
        weights = by_row @ parameters.to(by_head.dtype)  # [H, B P, 2 S]
    return weights.view(H, B, D // H, 2, parameters.shape[-1] // 2).permute(3, 0, 1, 2, 4)
