"""From which length on Primal-Attention is faster than softmax attention."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from primal_attention.benchmarking.results import CROSSOVER, Row, number, select, time_column

_SAME = ("causal", "dim", "heads", "directions", "dtype", "pass")


class Crossover(NamedTuple):
    """Where the time of one form falls below that of softmax attention."""

    length: float | None  # None: nowhere that was measured
    note: str


def crossover(ours: dict[int, float], theirs: dict[int, float]) -> Crossover:
    """The smallest length from which on ours is faster, from times by length.

    Between two lengths, the logarithm of the ratio is taken as linear in that of the length.
    """
    lengths = sorted(ours.keys() & theirs.keys())
    if len(lengths) < 2:
        return Crossover(None, "fewer than two lengths were measured for both")
    gains = [math.log(theirs[n] / ours[n]) for n in lengths]  # positive where ours is faster
    slower = [i for i, gain in enumerate(gains) if gain <= 0]
    if not slower:
        return Crossover(lengths[0], "faster at every length measured, this is the shortest")
    last = slower[-1]
    if last == len(lengths) - 1:
        return Crossover(None, f"slower at {lengths[last]}, the longest measured")
    share = -gains[last] / (gains[last + 1] - gains[last])
    low, high = math.log(lengths[last]), math.log(lengths[last + 1])
    between = f"interpolated between {lengths[last]} and {lengths[last + 1]}"
    return Crossover(math.exp(low + share * (high - low)), between)


def crossover_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each form of Primal-Attention, pass and choice of sizes; n is the length."""
    column = time_column(rows)
    primal, softmax = (select(rows, mechanism=name) for name in ("primal", "softmax"))
    for weights, form in dict.fromkeys((row["weights"], _form(row)) for row in primal):
        ours = [row for row in primal if row["weights"] == weights and _form(row) == form]
        theirs = [row for row in softmax if _form(row) == form]
        if theirs:
            found = crossover(_times(ours, column), _times(theirs, column))
            length = "" if found.length is None else str(round(found.length))
            cells = {"weights": weights, "n": length, "commit": ours[0]["commit"]}
            note = f"against softmax: {found.note}"
            yield {**_cells(form), "mechanism": CROSSOVER, **cells, "note": note}


def _form(row: Row) -> tuple[str, ...]:
    """What has to be the same in both: the sizes but for the length, and the tokens in all."""
    return (*(row[name] for name in _SAME), str(int(row["n"]) * int(row["batch"])))


def _cells(form: tuple[str, ...]) -> Row:
    return dict(zip(_SAME, form, strict=False))


def _times(rows: Sequence[Row], column: str) -> dict[int, float]:
    """The better time of each length, eager or compiled."""
    times: dict[int, float] = {}
    for row in rows:
        for name in (column, f"compiled_{column}"):
            time = number(row, name)
            if time is not None:
                n = int(row["n"])
                times[n] = min(time, times.get(n, math.inf))
    return times
