"""The report of a check: one result for each clause, and the table that people read."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

ANY_FINITE = sys.float_info.max
"""The bound of numbers that need only be finite."""


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
