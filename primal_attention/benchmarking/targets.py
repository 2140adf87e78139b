"""Hold measured rows against what the layers must reach on one large GPU.

Everything is for D=512, H=8, s=32 and bfloat16. Targets of GPU time are for 65,536 tokens, forward
and backward with the objective. The better of eager and compiled counts; softmax attention is
compiled, the released arithmetic at the wall time of eager calls, which is how it is run. Targets
of the host are wall times: of small steps, of decoding, and of large eager steps against the GPU
time of the same row.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from primal_attention.benchmarking.plans import MILLION
from primal_attention.benchmarking.registry import BOTH
from primal_attention.benchmarking.results import number, select
from primal_attention.training.results import Row

_LENGTHS = (1024, 4096, 16384, 65536)
_SIZES = {"dim": 512, "heads": 8, "directions": 32, "dtype": "bfloat16"}
_TOKENS = 65536
_FLOOR = {"static": 1.5, "sampled": 1.6, "dual": 2.3}
_SOFTMAX = {1024: 2.0, 4096: 5.5, 16384: 17.0, 65536: 65.0}
_SOFTMAX_DUAL = {1024: 1.5, 4096: 4.0, 16384: 13.0, 65536: 50.0}
_RELEASED = 6.0
_CAUSAL = 1.25
_MEMORY = {"static": 0.55, "sampled": 0.55, "dual": 0.75}
_OP = {"fwd": 0.70, "bwd": 0.60}
_FORMS = (
    ("primal", "static", False),
    ("primal", "sampled", False),
    ("primal", "dual", False),
    ("primal", "static", True),
    ("primal", "dual", True),
)
_SMALL = ((128, 1), (512, 8))  # tokens and sequences
_STEP = {"static": 1.3, "sampled": 1.3, "dual": 1.6}  # ms, not causal; causal forms as dual
_COMPILED_STEP = 1.6
_SMALL_FORWARD = 0.25
_EAGER = 1.5  # times the GPU time of the same step
_DECODING = {"step": 0.25, "decode": 0.08}
_LINEAR = 2.0
_TIME = {True: 2.0, False: 2.6}  # ms, causal or not
_TIME_MEMORY = 1.2  # times SDPA's
_TIME_STEP = 0.3


class Verdict(NamedTuple):
    """A target and what was measured."""

    what: str
    n: int
    value: float | None  # None: not measured
    target: float
    at_most: bool = True

    @property
    def met(self) -> bool | None:
        """True if the target is reached; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Check every target."""
    table = _Table(rows)
    yield from _gpu_times(table)
    yield from _memory_and_bandwidth(table)
    yield _longest(table, "primal")
    yield from _small_steps(table)
    yield from _eager(table, *_FORMS)
    yield from _decoding(table)
    yield from _learned_time(table)


def commits(rows: Sequence[Row]) -> list[str]:
    """List the commits of the rows that the targets are held against."""
    return sorted({row["commit"] for row in _Table(rows).rows})


class _Table:
    """The rows of the sizes that the targets are for."""

    def __init__(self, rows: Sequence[Row]):
        self.of_any_total = select(rows, **_SIZES)
        self.rows = [row for row in self.of_any_total if _tokens(row) == _TOKENS]

    def best(self, column: str, n: int, **form: object) -> float | None:
        """The better of eager and compiled."""
        found = select(self.rows, **{"causal": False, "kind": BOTH, **form}, n=n)
        cells = [number(row, name) for row in found for name in (column, f"compiled_{column}")]
        return min((cell for cell in cells if cell is not None), default=None)

    def primal(self, column: str, n: int, weights: str, *, causal: bool = False) -> float | None:
        """The better of eager and compiled Primal layers."""
        return self.best(column, n, mechanism="primal", weights=weights, causal=causal)

    def cell(self, column: str, **form: object) -> float | None:
        """The number in a column of the one row of this form, and of all tokens."""
        return _first(self.rows, column, form)

    def small(self, column: str, **form: object) -> float | None:
        """The number in a column of the one row of this form, whose batch is given."""
        return _first(self.of_any_total, column, form)


def _first(rows: Sequence[Row], column: str, form: dict[str, object]) -> float | None:
    return next((number(row, column) for row in select(rows, **{"kind": BOTH, **form})), None)


def _tokens(row: Row) -> int:
    return int(row["n"] or 0) * int(row.get("batch") or 0)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below == 0 else above / below


def _gpu_times(table: _Table) -> Iterator[Verdict]:
    """GPU times against the projections, softmax attention, the released arithmetic."""
    for (weights, limit), n in product(_FLOOR.items(), _LENGTHS):
        floor = table.best("gpu_ms", n, mechanism="projections")
        ratio = _ratio(table.primal("gpu_ms", n, weights), floor)
        yield Verdict(f"{weights} / projections", n, ratio, limit)
    for weights in _FLOOR:
        targets = {256: 1.0, **(_SOFTMAX_DUAL if weights == "dual" else _SOFTMAX)}
        for n, target in targets.items():
            compiled = table.cell("compiled_gpu_ms", mechanism="softmax", causal=False, n=n)
            ratio = _ratio(compiled, table.primal("gpu_ms", n, weights))
            yield Verdict(f"SDPA compiled / {weights}", n, ratio, target, at_most=False)
    for n in _LENGTHS:
        wall = table.cell("wall_ms", mechanism="released", causal=False, n=n)
        ratio = _ratio(wall, table.primal("gpu_ms", n, "sampled"))
        yield Verdict("released, wall / sampled", n, ratio, _RELEASED, at_most=False)
    for weights, n in product(("static", "dual"), _LENGTHS):
        causal = table.primal("gpu_ms", n, weights, causal=True)
        ratio = _ratio(causal, table.primal("gpu_ms", n, weights))
        yield Verdict(f"{weights}, causal / not causal", n, ratio, _CAUSAL)
    for n in (1024, 16384):
        value = table.best("gpu_ms", n, mechanism="linear", causal=True)
        yield Verdict("linear, causal, ms", n, value, _LINEAR)


def _memory_and_bandwidth(table: _Table) -> Iterator[Verdict]:
    for (weights, limit), n in product(_MEMORY.items(), _LENGTHS):
        softmax = table.best("peak_mib", n, mechanism="softmax")
        ratio = _ratio(table.primal("peak_mib", n, weights), softmax)
        yield Verdict(f"peak memory, {weights} / SDPA", n, ratio, limit)
    for (kind, target), weights, n in product(_OP.items(), ("static", "sampled"), (1024, 65536)):
        share = table.cell("copy_share", mechanism="primal_op", weights=weights, n=n, kind=kind)
        yield Verdict(f"op / copy, {kind}, {weights}", n, share, target, at_most=False)


def _longest(table: _Table, mechanism: str) -> Verdict:
    """Compare the longest sequence that was trained on with the target."""
    tried = select(table.of_any_total, mechanism=mechanism, batch=1, kind=BOTH)
    lengths = {int(row["n"]): number(row, "wall_ms") for row in tried if int(row["n"]) >= MILLION}
    trained = [n for n, time in lengths.items() if time is not None]
    longest = float(max(trained, default=0)) if lengths else None
    name = f"{mechanism}, tokens of one sequence"
    return Verdict(name, MILLION, longest, MILLION, at_most=False)


def _small_steps(table: _Table) -> Iterator[Verdict]:
    """Wall time of steps whose work is small."""
    for mechanism, weights, causal in _FORMS:
        form = {"mechanism": mechanism, "weights": weights, "causal": causal}
        name = f"{weights}{', causal' if causal else ''}"
        eager = _STEP["dual" if causal else weights]
        for n, batch in _SMALL:
            value = table.small("wall_ms", **form, n=n, batch=batch)
            yield Verdict(f"{name}, eager step of {batch}, ms", n, value, eager)
            value = table.small("compiled_wall_ms", **form, n=n, batch=batch)
            yield Verdict(f"{name}, compiled step of {batch}, ms", n, value, _COMPILED_STEP)
        value = table.small("wall_ms", **form, n=128, batch=1, kind="fwd")
        yield Verdict(f"{name}, eager forward, ms", 128, value, _SMALL_FORWARD)


def _eager(table: _Table, *forms: tuple[str, str, bool]) -> Iterator[Verdict]:
    """Wall time of eager training against the GPU time of the same step."""
    for (mechanism, weights, causal), n in product(forms, (1024, 16384)):
        form = {"mechanism": mechanism, "weights": weights, "causal": causal, "n": n}
        ratio = _ratio(table.cell("wall_ms", **form), table.cell("gpu_ms", **form))
        name = f"{mechanism}, {weights}{', causal' if causal else ''}"
        yield Verdict(f"{name}, eager wall / GPU", n, ratio, _EAGER)


def _decoding(table: _Table) -> Iterator[Verdict]:
    """Wall time of one token after 8,192 others."""
    for weights, batch, (kind, limit) in product(("static", "dual"), (1, 64), _DECODING.items()):
        form = {"mechanism": "primal", "weights": weights, "causal": True, "kind": kind}
        value = table.small("wall_ms", **form, n=8192, batch=batch)
        yield Verdict(f"{weights}, {kind} of {batch}, ms", 8192, value, limit)


def _learned_time(table: _Table) -> Iterator[Verdict]:
    """The kernel with a learned time: time, memory, one step of decoding and length."""
    for (causal, limit), n in product(_TIME.items(), (1024, 16384)):
        form: dict[str, Any] = {"mechanism": "primal_time", "causal": causal}
        name = f"primal_time{', causal' if causal else ''}"
        yield Verdict(f"{name}, ms", n, table.best("gpu_ms", n, **form), limit)
        softmax = table.best("peak_mib", n, mechanism="softmax", causal=causal)
        ratio = _ratio(table.best("peak_mib", n, **form), softmax)
        yield Verdict(f"peak memory, {name} / SDPA", n, ratio, _TIME_MEMORY)
    yield from _eager(table, ("primal_time", "dual", False), ("primal_time", "dual", True))
    for batch in (1, 64):
        form = {"mechanism": "primal_time", "causal": True, "kind": "step"}
        value = table.small("wall_ms", **form, n=8192, batch=batch)
        yield Verdict(f"primal_time, step of {batch}, ms", 8192, value, _TIME_STEP)
    yield _longest(table, "primal_time")
