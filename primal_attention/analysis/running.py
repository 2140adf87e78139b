"""Mean and deviation of numbers that come a few at a time."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class Spread(NamedTuple):
    """Mean and standard deviation (divided by the number of values, not one less)."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return "-" if self.mean != self.mean else f"{self.mean:.3g} ± {self.deviation:.2g}"


class Running:
    """Mean and deviation of rows [n, L], in float64; shorter rows are continued with ``fill``.

    The same numbers in other portions have the same mean and deviation, up to rounding.
    """

    def __init__(self, fill: float = 0.0):
        self.fill, self.count = fill, 0
        self._mean = torch.zeros(0, dtype=torch.float64)
        self._squares = torch.zeros(0, dtype=torch.float64)  # of the distances from the mean

    def add(self, rows: Tensor) -> None:
        """Take in more rows."""
        rows = rows.detach().to("cpu", torch.float64)
        length = max(len(self._mean), rows.shape[1])
        rows = pad(rows, (0, length - rows.shape[1]), value=self.fill)
        before = pad(self._mean, (0, length - len(self._mean)), value=self.fill)
        squares = pad(self._squares, (0, length - len(self._squares)))
        mean, n = rows.mean(0), len(rows)
        total, step = self.count + n, mean - before
        self._mean = before + step * (n / total)
        inside = (rows - mean).square().sum(0)
        self._squares = squares + inside + step.square() * (self.count * n / total)
        self.count = total

    @property
    def mean(self) -> Tensor:
        """[L]."""
        return self._mean

    @property
    def deviation(self) -> Tensor:
        """[L]."""
        return (self._squares / max(self.count, 1)).sqrt()

    def spread(self) -> Spread:
        """Of single numbers, rows of length 1."""
        return Spread(float(self.mean[0]), float(self.deviation[0]))
