"""What a patched layer is given in one pass, and how packed sequences in it are laid out.

Letters: B batch, N tokens, D model dim, C head dim, R sequences, L tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import Compaction


class Inputs(NamedTuple):
    """Tokens with all that is said of each."""

    x: Tensor  # [B, N, D]
    mask: Tensor | None = None  # [B, N], True at real tokens
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines [B or 1, N, C], if rotary

    @property
    def length(self) -> int:
        """N."""
        return self.x.shape[1]

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same change to everything; each tensor has the batch B then."""
        mask = None if self.mask is None else change(self.mask)
        rotation = self.rotation
        if rotation is not None:
            cos, sin = (part.expand(self.x.shape[0], -1, -1) for part in rotation)
            rotation = change(cos), change(sin)
        return Inputs(change(self.x), mask, rotation)

    def part(self, first: int, end: int) -> Inputs:
        """Some of the tokens."""
        return self.each(lambda tensor: tensor[:, first:end])

    def copied(self, first: int, end: int) -> Inputs:
        """A copy of some of the tokens, which keeps no memory of the others and no graph."""
        return self.each(lambda tensor: tensor.detach()[:, first:end].clone())


def joined(several: Sequence[Inputs]) -> Inputs:
    """The tokens of several passes as if they had come in one."""
    if len(several) == 1:
        return several[0]
    x = torch.cat([each.x for each in several], 1)
    mask = None
    if any(each.mask is not None for each in several):
        real = [
            each.x.new_ones(each.x.shape[:2], dtype=torch.bool) if each.mask is None else each.mask
            for each in several
        ]
        mask = torch.cat(real, 1)
    rotations = [each.rotation for each in several if each.rotation is not None]
    if not rotations:
        return Inputs(x, mask)
    cos, sin = (torch.cat(part, 1) for part in zip(*rotations, strict=True))
    return Inputs(x, mask, (cos, sin))


class Packing(NamedTuple):
    """Where the tokens of packed rows stand when each sequence has a row of its own."""

    there: Tensor  # [R, L]: the token at each place, counted over all rows; -1 at padding
    back: Tensor  # [B N]: the place of each token; -1 of padding

    @classmethod
    def of(cls, starts: Tensor, real: Tensor) -> Packing:
        """From the first token of the sequence that each token [B, N] belongs to."""
        along = (torch.arange(starts.shape[1], device=starts.device) - starts).flatten()
        real = real.flatten()
        number = ((along == 0) & real).cumsum(0) - 1
        longest = int(along[real].max()) + 1
        back = torch.where(real, number * longest + along, -1)
        there = back.new_full(((int(number[-1]) + 1) * longest,), -1)
        there[back[real]] = torch.arange(len(back), device=back.device)[real]
        return cls(there.view(-1, longest), back)

    @classmethod
    def between(cls, bounds: Tensor, x: Tensor) -> Packing:
        """From the bounds [R + 1] of the sequences among all tokens of x [B, N, D]."""
        tokens = torch.arange(x.shape[0] * x.shape[1], device=x.device)
        after = torch.searchsorted(bounds.to(tokens), tokens, right=True)
        starts = bounds.to(tokens)[after - 1][None]
        return cls.of(starts, torch.ones_like(starts, dtype=torch.bool))

    def unpack(self, inputs: Inputs) -> Inputs:
        """Each sequence in a row of its own."""
        x, _, rotation = inputs.each(self._unpacked)
        return Inputs(x, self.there >= 0, rotation)

    def pack(self, y: Tensor, like: Tensor) -> Tensor:
        """Outputs [R, L, D] in the places of the tokens; zero at padding."""
        return self._compaction.unpack(y).view_as(like)

    def _unpacked(self, z: Tensor) -> Tensor:
        return self._compaction.pack(z.flatten(0, 1))

    @property
    def _compaction(self) -> Compaction:
        there = self.there.flatten()
        return Compaction(there, self.back, tuple(self.there.shape), (len(self.back),))
