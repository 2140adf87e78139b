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

from primal_attention.ops.op import is_transformed


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens [B, M, ...] of x [B, N, ...] at the positions index [B, M]."""
    wide = index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:])
    return x.gather(1, wide)


class Compaction(NamedTuple):
    """One place for each token at most; -1 stands for no place and for no token."""

    there: Tensor | None  # [L]: the token at each place; None where nothing moves
    back: Tensor | None  # [N]: the place of each token
    shape: tuple[int, ...]  # of the places
    before: tuple[int, ...]  # of the tokens
    num_real: Tensor  # [B], of each sequence

    def pack(self, x: Tensor) -> Tensor:
        """Move tokens [*before, ...] to their places [*shape, ...]; zero where there is none."""
        return self._moved(x, back=False)

    def unpack(self, x: Tensor) -> Tensor:
        """Undo :meth:`pack`."""
        return self._moved(x, back=True)

    def real(self) -> Tensor:
        """Tell the places [B, N] that hold a token, if real tokens stand at the front."""
        return torch.arange(self.shape[1], device=self.num_real.device) < self.num_real[:, None]

    def bounds(self) -> Tensor:
        """Return the bounds [B + 1], int32, of sequences that stand one after the other."""
        return F.pad(self.num_real.cumsum(0), (1, 0)).int()

    def _moved(self, x: Tensor, *, back: bool) -> Tensor:
        if self.there is None or self.back is None:
            return x
        given, shape = (self.shape, self.before) if back else (self.before, self.shape)
        ways = (self.back, self.there) if back else (self.there, self.back)
        rows = x.reshape(math.prod(given), *x.shape[len(given) :])
        return _moved(rows, *ways).reshape(*shape, *rows.shape[1:])


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


def token_order(x: Tensor, mask: Tensor | None) -> Compaction:
    """Return the order that puts real tokens of x [B, N, ...], True in mask [B, N], first."""
    B, N = x.shape[:2]
    if mask is None:
        num_real = torch.full((B,), N, device=x.device)
        return Compaction(None, None, (B, N), (B, N), num_real)
    first = N * torch.arange(B, device=x.device)[:, None]
    up_to = mask.cumsum(1)
    place = torch.arange(N, device=mask.device)
    slot = torch.where(mask, up_to - 1, up_to[:, -1:] + place - up_to)
    token = torch.zeros_like(slot).scatter(1, slot, place.expand_as(slot))
    there, back = (token + first).flatten(), (slot + first).flatten()
    return Compaction(there, back, (B, N), (B, N), mask.sum(1))


def together(mask: Tensor) -> Compaction:
    """Pack all real tokens of a mask [B, N] one after the other; the last places stay empty."""
    real = mask.flatten()
    place, tokens = real.cumsum(0) - 1, torch.arange(len(real), device=mask.device)
    nowhere = torch.full((len(real) + 1,), -1, device=mask.device)
    there = nowhere.scatter(0, torch.where(real, place, len(real)), tokens)[:-1]
    back = torch.where(real, place, -1)
    return Compaction(there, back, (len(real),), tuple(mask.shape), mask.sum(1))


def padded(bounds: Tensor, num_tokens: int, longest: int) -> Compaction:
    """Pad packed sequences [1, T] with bounds [B + 1] to [B, longest]."""
    B, device = bounds.shape[0] - 1, bounds.device
    places = bounds[:-1, None] + torch.arange(longest, device=device)
    there = torch.where(places < bounds[1:, None], places, -1).flatten()
    tokens = torch.arange(num_tokens, device=device)
    sequence = torch.searchsorted(bounds[1:], tokens, right=True)
    along = tokens - bounds[sequence]
    inside = (along < longest) & (sequence < B)
    back = torch.where(inside, sequence * longest + along, -1)
    return Compaction(there, back, (B, longest), (1, num_tokens), bounds.diff())
