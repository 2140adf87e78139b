"""Real tokens in their order: what a position is where padding may stand anywhere.

Mechanisms with positions count the real tokens only. Those that work on neighbours move them to the
front first (*pack*) and move the results back (*unpack*); all of it stays on the device.

Letters: B batch, N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from primal_attention.ops.gradients import is_transformed


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
        return x if self.slot is None else _permuted(x, _inverse(self.slot), self.slot)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return x if self.slot is None else _permuted(x, self.slot, _inverse(self.slot))

    def real(self) -> Tensor:
        """Which of the packed tokens are real, bool [B, N]."""
        return torch.arange(self.length, device=self.num_real.device) < self.num_real[:, None]


def token_order(x: Tensor, mask: Tensor | None) -> Order:
    """The order of the tokens x [B, N, ...] under a mask [B, N] that is True at real tokens."""
    B, N = x.shape[:2]
    if mask is None:
        return Order(None, torch.full((B,), N, device=x.device), N)
    num_real, up_to = mask.sum(1), mask.cumsum(1)
    after_the_real = num_real[:, None] + torch.arange(N, device=x.device) - up_to
    return Order(torch.where(mask, up_to - 1, after_the_real), num_real, N)


def _inverse(permutation: Tensor) -> Tensor:
    """Where each position of the permutations [B, N] occurs."""
    place = torch.arange(permutation.shape[1], device=permutation.device)
    return torch.zeros_like(permutation).scatter(1, permutation, place.expand_as(permutation))


def _permuted(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    if is_transformed():  # torch.compile takes no autograd.Function with a form for forward mode
        return take(x, index)
    return _Permuted.apply(x, index, inverse)  # type: ignore[no-any-return, no-untyped-call]


class _Permuted(torch.autograd.Function):
    """The tokens [B, N, ...] at the positions index [B, N], of which each occurs once.

    The gradient moves whole rows as well; that of a gather would add single numbers to zeros.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        B, N = index.shape
        row = index + N * torch.arange(B, device=index.device)[:, None]
        return x.flatten(0, 1).index_select(0, row.flatten()).view(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.saved_tensors
        return _permuted(gradients[0], inverse, index), None, None
