"""Findings of a clause, and the report of a check: one result for each clause, as a table."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

ANY_FINITE = sys.float_info.max
"""The bound of numbers that need only be finite."""

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
        """Record the deviation of two tensors, which rounding may bring to `bound`, if not 0."""
        self.at_most(what, deviation(got, want), bound * self.rounding)

    def zero(self, what: str, tensor: Tensor) -> None:
        """Record that a tensor must be exactly 0."""
        self.at_most(what, magnitude(tensor), 0.0)

    def finite(self, what: str, *tensors: Tensor) -> None:
        """Record that tensors hold neither NaN nor inf."""
        largest = max(map(magnitude, tensors))
        self.at_most(f"NaN or inf in {what}", largest, ANY_FINITE)

    def worst(self) -> Observation:
        """Return the observation that is furthest beyond its bound, or nearest to it."""
        return max(self.observations, key=lambda seen: seen.excess)

    def broken(self) -> list[Observation]:
        """Return the observations that do not keep their bounds, the worst first."""
        broken = [seen for seen in self.observations if seen.excess > 1]
        return sorted(broken, key=lambda seen: -seen.excess)


def magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value; inf if a value is NaN or infinite, 0 if there is none."""
    if tensor.numel() == 0:
        return 0.0
    largest = float(tensor.detach().abs().max())
    return largest if math.isfinite(largest) else math.inf


def error_line(error: Exception) -> str:
    """Describe an error by its class and its first line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def deviation(got: Tensor, want: Tensor) -> float:
    """Divide the largest difference by the largest value of `want`, or by 1 if that is greater.

    NaN and inf in either tensor are an infinite deviation: NaN never equals NaN here, so that two
    broken results cannot agree.
    """
    if got.shape != want.shape:
        raise ValueError(f"the shapes differ: {tuple(got.shape)} against {tuple(want.shape)}")
    scale = max(magnitude(want), 1.0)
    if math.isinf(scale) or math.isinf(magnitude(got)):
        return math.inf
    return magnitude(got.double() - want.double()) / scale


class Status(StrEnum):
    """Outcome of a clause."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    EXEMPT = "exempt"


@dataclass(frozen=True)
class ClauseResult:
    """The outcome of one clause.

    Attributes:
        name: The name of the clause, as in `CLAUSES`.
        status: Passed, failed, not applicable or exempt.
        measured: The number that came closest to its bound or went furthest beyond it; None where
            nothing was measured.
        bound: What `measured` was held against.
        at_least: Whether the bound is a lower one; most are upper bounds.
        detail: One sentence: what holds, what is broken, or why the clause did not run.
    """

    name: str
    status: Status
    measured: float | None
    bound: float | None
    at_least: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """The outcome of a whole check; `str(report)` is an aligned table in plain text."""

    subject: str
    results: tuple[ClauseResult, ...]

    @property
    def passed(self) -> bool:
        """True if no clause failed; clauses that are exempt or do not apply count as neither."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """The names of the broken clauses, in order."""
        return tuple(result.name for result in self.results if result.status is Status.FAILED)

    def __getitem__(self, name: str) -> ClauseResult:
        for result in self.results:
            if result.name == name:
                return result
        names = ", ".join(result.name for result in self.results)
        raise KeyError(f"no clause is called {name!r}; the clauses are: {names}")

    def __str__(self) -> str:
        counts = [
            f"{count} {status}"
            for status in Status
            if (count := sum(result.status is status for result in self.results))
        ]
        header = ("clause", "status", "measured", "bound", "detail")
        table = _aligned([header, *map(_row, self.results)])
        return f"Attention contract of {self.subject}: {', '.join(counts)}\n\n{table}"


class ContractError(AssertionError):
    """Some clause of the attention contract is broken; the message is the whole report.

    Attributes:
        report: The report, for programs.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


def _row(result: ClauseResult) -> tuple[str, ...]:
    measured = "-" if result.measured is None else _number(result.measured)
    return (result.name, str(result.status), measured, _bound(result), result.detail)


def _bound(result: ClauseResult) -> str:
    if result.bound is None:
        return "-"
    if result.bound == ANY_FINITE:
        return "finite"
    return f"{'>=' if result.at_least else '<='} {_number(result.bound)}"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else "not finite"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = tuple("-" * width for width in (*widths[:-1], len(rows[0][-1])))
    rows = [rows[0], rule, *rows[1:]]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines)
