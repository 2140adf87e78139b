"""Findings of a clause: measured numbers, each with its bound."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from primal_attention.testing.report import ANY_FINITE

_UNIT_OF_EXACTNESS = 1e-6  # only ranks what should have been 0 among the other observations


class NotApplicable(Exception):  # noqa: N818 - it reports an outcome, not an error
    """The clause says nothing about this module; the message is the reason."""


class Observation(NamedTuple):
    """One measured number and the bound it must keep."""

    what: str
    value: float
    bound: float
    at_least: bool = False

    @property
    def excess(self) -> float:
        """The value in units of its bound: above 1 the bound is broken."""
        if math.isnan(self.value):
            return math.inf
        if self.at_least:
            return self.bound / self.value if self.value else math.inf
        if self.bound == 0:
            return 1 + self.value / _UNIT_OF_EXACTNESS if self.value else 0.0
        return self.value / self.bound


@dataclass
class Findings:
    """The observations of one clause.

    Attributes:
        detail: One sentence that the report shows when every bound is kept.
        rounding: What the bounds of `close` are multiplied by.
    """

    detail: str
    rounding: float = 1.0
    observations: list[Observation] = field(default_factory=list)

    def at_most(self, what: str, value: float, bound: float) -> None:
        """Record a number that must not exceed `bound`."""
        self.observations.append(Observation(what, value, bound))

    def at_least(self, what: str, value: float, bound: float) -> None:
        """Record a number that must reach `bound`."""
        self.observations.append(Observation(what, value, bound, at_least=True))

    def close(self, what: str, got: Tensor, want: Tensor, bound: float) -> None:
        """Record the deviation of two tensors, which rounding alone may bring to `bound`."""
        self.at_most(what, deviation(got, want), bound * self.rounding)

    def identical(self, what: str, got: Tensor, want: Tensor) -> None:
        """Record that two tensors must agree in every bit."""
        self.at_most(what, deviation(got, want), 0.0)

    def zero(self, what: str, tensor: Tensor) -> None:
        """Record that a tensor must be exactly 0."""
        self.at_most(what, magnitude(tensor), 0.0)

    def finite(self, what: str, *tensors: Tensor) -> None:
        """Record that tensors hold neither NaN nor inf."""
        largest = max(map(magnitude, tensors))
        self.at_most(f"NaN or inf in {what}", largest, ANY_FINITE)

    def worst(self) -> Observation:
        """The observation that is furthest beyond its bound, or nearest to it."""
        return max(self.observations, key=lambda seen: seen.excess)

    def broken(self) -> list[Observation]:
        """The observations that do not keep their bounds, the worst first."""
        broken = [seen for seen in self.observations if seen.excess > 1]
        return sorted(broken, key=lambda seen: -seen.excess)


def magnitude(tensor: Tensor) -> float:
    """The largest absolute value; inf where a value is NaN or infinite, 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0.0
    largest = float(tensor.detach().abs().max())
    return largest if math.isfinite(largest) else math.inf


def deviation(got: Tensor, want: Tensor) -> float:
    """The largest difference in units of the largest value of `want`, or of 1 if that is greater.

    NaN and inf in either tensor are an infinite deviation: NaN never equals NaN here, so that two
    broken results cannot agree.
    """
    if got.shape != want.shape:
        raise ValueError(f"the shapes differ: {tuple(got.shape)} against {tuple(want.shape)}")
    scale = max(magnitude(want), 1.0)
    if math.isinf(scale) or math.isinf(magnitude(got)):
        return math.inf
    return magnitude(got.double() - want.double()) / scale
