"""Move real tokens together and back, wherever padding stands.

Mechanisms with positions count the real tokens only. Those that work on neighbours move them to the
front of their sequence, flash attention takes all sequences one after the other, and packed
sequences are padded to the length of the longest. Each is a :class:`Compaction`: *pack* and
*unpack*. Nothing synchronises, and no shape depends on the masks.

Letters: B batch, N tokens, L places.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.gradients import is_transformed


def take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens [B, M, ...] of x [B, N, ...] at the positions index [B, M]."""
    wide = index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, wide)


class Compaction(NamedTuple):
    """One place for each token at most; -1 stands for no place and for no token."""

    there: Tensor  # [L]: the token at each place
    back: Tensor  # [N]: the place of each token
    shape: tuple[int, ...]  # of the places
    before: tuple[int, ...]  # of the tokens

    def pack(self, x: Tensor) -> Tensor:
        """The tokens [*before, ...] at their places [*shape, ...]; zero where there is none."""
        return self._moved(x, self.before, self.there, self.back, self.shape)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return self._moved(x, self.shape, self.back, self.there, self.before)

    @staticmethod
    def _moved(
        x: Tensor, given: tuple[int, ...], there: Tensor, back: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        rows = x.reshape(math.prod(given), *x.shape[len(given) :])
        return _moved(rows, there, back).reshape(*shape, *rows.shape[1:])


def _moved(rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
    if is_transformed():  # torch.compile takes no autograd.Function with a form for forward mode
        return _gathered(rows, there)
    return _Moved.apply(rows, there, back)  # type: ignore[no-any-return, no-untyped-call]


def _gathered(rows: Tensor, there: Tensor) -> Tensor:
    """The rows at their places, by operations of PyTorch alone."""
    given = there.view(-1, *[1] * (rows.ndim - 1)) >= 0
    return torch.where(given, rows.index_select(0, there.clamp(min=0)), 0.0)


class _Moved(torch.autograd.Function):
    """Rows [N, ...] at their places [L, ...]: the gradient is a gather too, and adds nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        return _gathered(rows, there)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        there, back = ctx.saved_tensors
        return _moved(gradients[0], back, there), None, None


class Order(NamedTuple):
    """The order of the tokens of a batch: the real ones first, then the padding."""

    compaction: Compaction | None  # None where nothing is padded
    num_real: Tensor  # [B]
    length: int  # N

    def pack(self, x: Tensor) -> Tensor:
        """The tokens [B, N, ...] in order: the real ones at the front."""
        return x if self.compaction is None else self.compaction.pack(x)

    def unpack(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`pack`."""
        return x if self.compaction is None else self.compaction.unpack(x)

    def real(self) -> Tensor:
        """Which of the packed tokens are real, bool [B, N]."""
        return torch.arange(self.length, device=self.num_real.device) < self.num_real[:, None]


def token_order(x: Tensor, mask: Tensor | None) -> Order:
    """The order of the tokens x [B, N, ...] under a mask [B, N] that is True at real tokens."""
    B, N = x.shape[:2]
    if mask is None:
        return Order(None, torch.full((B,), N, device=x.device), N)
    first = N * torch.arange(B, device=x.device)[:, None]
    slot = slots(mask)
    there = (inverse(slot) + first).flatten()
    moved = Compaction(there, (slot + first).flatten(), (B, N), (B, N))
    return Order(moved, mask.sum(1), N)


def slots(mask: Tensor) -> Tensor:
    """The place [B, N] of each token when the real ones of the mask [B, N] come first."""
    up_to = mask.cumsum(1)
    padding = up_to[:, -1:] + torch.arange(mask.shape[1], device=mask.device) - up_to
    return torch.where(mask, up_to - 1, padding)


def inverse(permutation: Tensor) -> Tensor:
    """Where each position of the permutations [B, N] occurs."""
    place = torch.arange(permutation.shape[1], device=permutation.device)
    return torch.zeros_like(permutation).scatter(1, permutation, place.expand_as(permutation))


def together(mask: Tensor) -> tuple[Compaction, Tensor]:
    """All real tokens of a mask [B, N] one after the other, and their bounds [B + 1], int32.

    The places behind the last belong to no sequence.
    """
    real = mask.flatten()
    place, tokens = real.cumsum(0) - 1, torch.arange(len(real), device=mask.device)
    nowhere = torch.full((len(real) + 1,), -1, device=mask.device)
    there = nowhere.scatter(0, torch.where(real, place, len(real)), tokens)[:-1]
    back, bounds = torch.where(real, place, -1), F.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    return Compaction(there, back, (len(real),), tuple(mask.shape)), bounds


def padded(bounds: Tensor, num_tokens: int, longest: int) -> tuple[Compaction, Tensor]:
    """Packed sequences with bounds [B + 1] as [B, longest], and the mask of their tokens."""
    B, device = bounds.shape[0] - 1, bounds.device
    places = bounds[:-1, None] + torch.arange(longest, device=device)
    mask = places < bounds[1:, None]
    tokens = torch.arange(num_tokens, device=device)
    sequence = torch.searchsorted(bounds[1:], tokens, right=True)
    along = tokens - bounds[sequence]
    inside = (along < longest) & (sequence < B)
    back = torch.where(inside, sequence * longest + along, -1)
    there = torch.where(mask, places, -1).flatten()
    return Compaction(there, back, (B, longest), (num_tokens,)), mask
