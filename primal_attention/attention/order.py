"""Real tokens in their order: what a position is where padding may stand anywhere.

Mechanisms with positions count the real tokens only. Those that work on neighbours move them to the
front first (*pack*) and move the results back (*unpack*); all of it stays on the device.

Letters: B batch, N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens [B, M, ...] of x [B, N, ...] at the positions index [B, M]."""
    wide = index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, wide)


class Order(NamedTuple):
    """The order of the tokens of a batch: the real ones first, then the padding."""

    slot: Tensor | None  # [B, N]: place of each token in that order; None where nothing is padded
    num_real: Tensor  # [B]
    length: int  # N

    def pack(self, x: Tensor) -> Tensor:
        """The tokens [B, N, ...] in order: the real ones at the front."""
        return x if self.slot is None else take(x, self.slot.argsort(dim=1))

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return x if self.slot is None else take(x, self.slot)

    def real(self) -> Tensor:
        """Which of the packed tokens are real, bool [B, N]."""
        return torch.arange(self.length, device=self.num_real.device) < self.num_real[:, None]


def token_order(x: Tensor, mask: Tensor | None) -> Order:
    """The order of the tokens x [B, N, ...] under a mask [B, N] that is True at real tokens."""
    B, N = x.shape[:2]
    if mask is None:
        return Order(None, torch.full((B,), N, device=x.device), N)
    num_real = mask.sum(1)
    after_the_real = num_real[:, None] + (~mask).cumsum(1)
    return Order(torch.where(mask, mask.cumsum(1), after_the_real) - 1, num_real, N)
