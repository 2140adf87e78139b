"""Neighbouring keys and values pooled into one: the smaller training sets of Attention-SH.

Letters: B batch, T source tokens, M pooled tokens, H heads, C head dim, w tokens of a window.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.attention.base.validation import check_choice, check_sizes
from primal_attention.precision import accumulation_dtype


class Source(NamedTuple):
    """Keys and values, and which of them are real; None where all are."""

    k: Tensor  # [B, T, H, C]
    v: Tensor  # [B, T, H, C]
    mask: Tensor | None  # [B, T]


def average(z: Tensor, real: Tensor | None) -> Tensor:
    """Mean [B, M, H, C] of the real tokens of each window of z [B, M, w, H, C]."""
    if real is None:
        return z.mean(2)
    real = real[..., None, None]
    total = torch.where(real, z, 0.0).sum(2, dtype=accumulation_dtype(z.dtype))
    return (total / real.sum(2).clamp(min=1)).to(z.dtype)


def largest(z: Tensor, real: Tensor | None) -> Tensor:
    """Maximum of each feature over the real tokens; 0 where there is none."""
    if real is None:
        return z.amax(2)
    real = real[..., None, None]
    lowest = torch.finfo(z.dtype).min
    return torch.where(real.any(2), torch.where(real, z, lowest).amax(2), 0.0)


def first(z: Tensor, real: Tensor | None) -> Tensor:
    """The first real token of each window: down-sampling with a stride."""
    if real is None:
        return z[:, :, 0]
    index = real.int().argmax(2)[:, :, None, None, None]
    return z.gather(2, index.expand(z.shape[0], -1, -1, *z.shape[3:]))[:, :, 0]


POOLS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "average": average,
    "max": largest,
    "stride": first,
}


@dataclass(frozen=True)
class TokenPooling:
    """How many neighbours become one, and which tokens are neighbours.

    Attributes:
        pool: ``average``, ``max`` or ``stride``, see :data:`POOLS`.
        grid: Rows and columns of the tokens of an image; None for a sequence.
        num_prefix_tokens: How many tokens at the front are kept as they are (a class token).
    """

    pool: str = "average"
    grid: tuple[int, int] | None = None
    num_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        check_choice("pool", self.pool, POOLS)
        if self.grid is not None:
            if len(self.grid) != 2:
                raise ValueError(f"grid must be a pair (rows, columns), got {self.grid!r}")
            check_sizes(**{f"grid[{i}]": size for i, size in enumerate(self.grid)})
        prefix = self.num_prefix_tokens
        if not isinstance(prefix, int) or prefix < 0:
            raise ValueError(f"num_prefix_tokens must be an integer of at least 0, got {prefix!r}")

    def check_length(self, length: int) -> None:
        """Raise unless so many tokens fill the grid."""
        if self.grid is None:
            return
        expected = self.num_prefix_tokens + math.prod(self.grid)
        if length != expected:
            raise ValueError(
                f"grid={self.grid} with num_prefix_tokens={self.num_prefix_tokens} needs "
                f"{expected} keys, got {length}"
            )

    def __call__(self, source: Source, scale: int) -> Source:
        """One key and value for each window of ``scale`` tokens; real where any token of it is.

        Sequences must have their real tokens at the front. A last window that is not full is
        pooled over the tokens it has.
        """
        k, v, mask = source
        P = self.num_prefix_tokens
        grid = self.grid or (1, max(k.shape[1] - P, 0))
        window = window_shape(scale) if self.grid else (1, scale)
        real = None if mask is None else windows(mask[:, P:], grid, window)
        full = mask is None and _divides(window, grid)
        if real is None and not full:
            real = windows(torch.ones_like(k[:1, P:, 0, 0], dtype=torch.bool), grid, window)
        pool = POOLS[self.pool]
        k, v = (
            torch.cat([z[:, :P], pool(windows(z[:, P:], grid, window), real)], dim=1)
            for z in (k, v)
        )
        if mask is None or real is None:
            return Source(k, v, None)
        return Source(k, v, torch.cat([mask[:, :P], real.any(2)], dim=1))


def _divides(window: tuple[int, int], grid: tuple[int, int]) -> bool:
    """Whether every window is full, for any length where an export leaves it open."""
    sizes_known = all(isinstance(size, int) for size in grid)
    return sizes_known and not any(map(operator.mod, grid, window))


def window_shape(scale: int) -> tuple[int, int]:
    """Sides of the most nearly square window of ``scale`` tokens, the shorter first."""
    shorter = next(side for side in range(math.isqrt(scale), 0, -1) if scale % side == 0)
    return shorter, scale // shorter


def windows(z: Tensor, grid: tuple[int, int], window: tuple[int, int]) -> Tensor:
    """The tokens [B, T, ...] of a grid as windows [B, M, w, ...], filled up with zeros (False)."""
    (rows, columns), (height, width) = grid, window
    y, x = (rows + height - 1) // height, (columns + width - 1) // width
    B, rest = z.shape[0], z.shape[2:]
    z = z.reshape(B, rows, columns, *rest)
    z = F.pad(z, [0, 0] * len(rest) + [0, x * width - columns, 0, y * height - rows])
    z = z.reshape(B, y, height, x, width, *rest).transpose(2, 3)
    return z.reshape(B, y * x, height * width, *rest)
