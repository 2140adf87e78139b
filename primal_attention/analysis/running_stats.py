"""Mean and deviation of numbers that come a few at a time."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class MeanDeviation(NamedTuple):
    """Mean and standard deviation (divided by the number of values, not one less)."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return "-" if self.mean != self.mean else f"{self.mean:.3g} ± {self.deviation:.2g}"


class RunningStats:
    """Mean and deviation of rows [n, L], in float64; shorter rows are continued with ``fill``.

    Portions make no difference beyond rounding.
    """

    def __init__(self, fill: float = 0.0):
        self.fill, self.count = fill, 0
        self.mean = torch.zeros(0, dtype=torch.float64)  # [L]
        self._squares = torch.zeros(0, dtype=torch.float64)  # of the distances from the mean

    def add(self, rows: Tensor) -> None:
        """Include more rows."""
        rows = rows.detach().to("cpu", torch.float64)
        length = max(len(self.mean), rows.shape[1])
        rows = pad(rows, (0, length - rows.shape[1]), value=self.fill)
        before = pad(self.mean, (0, length - len(self.mean)), value=self.fill)
        squares = pad(self._squares, (0, length - len(self._squares)))
        mean, n = rows.mean(0), len(rows)
        total, step = self.count + n, mean - before
        self.mean = before + step * (n / total)
        inside = (rows - mean).square().sum(0)
        self._squares = squares + inside + step.square() * (self.count * n / total)
        self.count = total

    @property
    def deviation(self) -> Tensor:
        """Standard deviation, [L]."""
        return (self._squares / max(self.count, 1)).sqrt()

    def columns(self) -> list[MeanDeviation]:
        """Mean and deviation of each column."""
        pairs = zip(self.mean.tolist(), self.deviation.tolist(), strict=True)
        return [MeanDeviation(*pair) for pair in pairs]
