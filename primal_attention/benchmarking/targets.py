"""What the layer must reach on one large GPU, held against measured rows.

Everything is for D=512, H=8, s=32, bfloat16 and 65,536 tokens, forward and backward with the
objective, in GPU time. The better of eager and compiled counts; softmax attention is compiled,
the released arithmetic at the wall time of eager calls, which is how it is run. On a CPU, training
with 4,096 tokens in float32 is compared by wall time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from primal_attention.benchmarking.plans import BOTH, MILLION
from primal_attention.benchmarking.results import Row, number, select

_LENGTHS = (1024, 4096, 16384, 65536)
_SIZES = {"dim": 512, "heads": 8, "directions": 32, "dtype": "bfloat16"}
_TOKENS = 65536
_FLOOR = {"static": 1.5, "sampled": 1.6, "dual": 2.3}
_SOFTMAX = {1024: 2.0, 4096: 5.5, 16384: 17.0, 65536: 65.0}
_SOFTMAX_DUAL = {1024: 1.5, 4096: 4.0, 16384: 13.0, 65536: 50.0}
_RELEASED = 6.0
_RELEASED_OP_ON_CPU = 2.0
_CAUSAL = 1.25
_MEMORY = {"static": 0.55, "sampled": 0.55, "dual": 0.75}
_OP = {"fwd": 0.70, "bwd": 0.60}


class Verdict(NamedTuple):
    """A target and what was measured."""

    what: str
    n: int
    value: float | None  # None: not measured
    target: float
    at_most: bool

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def verdicts(rows: Sequence[Row]) -> Iterator[Verdict]:
    """Every target, in the order of the table."""
    table = _Table(rows)
    yield from _against_the_floor(table)
    yield from _against_softmax(table)
    yield from _against_released(table)
    yield from _causal(table)
    yield from _memory(table)
    yield from _op_alone(table)
    yield from _one_sequence(rows)
    yield from _on_a_cpu(rows)


def commits(rows: Sequence[Row]) -> list[str]:
    """Of the rows that the targets are held against."""
    return sorted({row["commit"] for row in _Table(rows).rows})


class _Table:
    """The rows of the sizes that the targets are for."""

    def __init__(self, rows: Sequence[Row]):
        of_sizes = select(rows, **_SIZES)
        self.rows = [row for row in of_sizes if _tokens(row) == _TOKENS]

    def best(self, column: str, n: int, kind: str = BOTH, **form: object) -> float | None:
        """The better of eager and compiled."""
        wanted: dict[str, object] = {"causal": False, **form, "n": n, "kind": kind}
        found = select(self.rows, **wanted)
        cells = [number(row, name) for row in found for name in (column, f"compiled_{column}")]
        return min((cell for cell in cells if cell is not None), default=None)

    def primal(self, column: str, n: int, weights: str, *, causal: bool = False) -> float | None:
        return self.best(column, n, mechanism="primal", weights=weights, causal=causal)


def _tokens(row: Row) -> int:
    return int(row["n"] or 0) * int(row.get("batch") or 0)


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None or below == 0 else above / below


def _against_the_floor(table: _Table) -> Iterator[Verdict]:
    for weights, limit in _FLOOR.items():
        for n in _LENGTHS:
            floor = table.best("gpu_ms", n, mechanism="projections")
            ratio = _ratio(table.primal("gpu_ms", n, weights), floor)
            yield Verdict(f"{weights} / projections", n, ratio, limit, at_most=True)


def _against_softmax(table: _Table) -> Iterator[Verdict]:
    for weights in _FLOOR:
        targets = {256: 1.0, **(_SOFTMAX_DUAL if weights == "dual" else _SOFTMAX)}
        for n, target in targets.items():
            compiled = select(table.rows, mechanism="softmax", causal=False, n=n, kind=BOTH)
            times = [number(row, "compiled_gpu_ms") for row in compiled]
            ratio = _ratio(next(iter(times), None), table.primal("gpu_ms", n, weights))
            yield Verdict(f"SDPA compiled / {weights}", n, ratio, target, at_most=False)


def _against_released(table: _Table) -> Iterator[Verdict]:
    for n in _LENGTHS:
        rows = select(table.rows, mechanism="released", causal=False, n=n, kind=BOTH)
        wall = next((number(row, "wall_ms") for row in rows), None)
        ratio = _ratio(wall, table.primal("gpu_ms", n, "sampled"))
        yield Verdict("released, wall / sampled", n, ratio, _RELEASED, at_most=False)


def _causal(table: _Table) -> Iterator[Verdict]:
    for weights in ("static", "dual"):
        for n in _LENGTHS:
            causal = table.primal("gpu_ms", n, weights, causal=True)
            ratio = _ratio(causal, table.primal("gpu_ms", n, weights))
            yield Verdict(f"{weights}, causal / not causal", n, ratio, _CAUSAL, at_most=True)


def _memory(table: _Table) -> Iterator[Verdict]:
    for weights, limit in _MEMORY.items():
        for n in _LENGTHS:
            softmax = table.best("peak_mib", n, mechanism="softmax")
            ratio = _ratio(table.primal("peak_mib", n, weights), softmax)
            yield Verdict(f"peak memory, {weights} / SDPA", n, ratio, limit, at_most=True)


def _op_alone(table: _Table) -> Iterator[Verdict]:
    for kind, target in _OP.items():
        for weights in ("static", "sampled"):
            for n in (1024, 65536):
                form = {"mechanism": "primal_op", "weights": weights, "n": n, "kind": kind}
                share = next((number(r, "copy_share") for r in select(table.rows, **form)), None)
                what = f"op / copy, {kind}, {weights}"
                yield Verdict(what, n, share, target, at_most=False)


def _one_sequence(rows: Sequence[Row]) -> Iterator[Verdict]:
    tried = select(rows, mechanism="primal", batch=1, kind=BOTH)
    lengths = {int(row["n"]): number(row, "wall_ms") for row in tried if int(row["n"]) >= MILLION}
    trained = [n for n, time in lengths.items() if time is not None]
    longest = float(max(trained, default=0)) if lengths else None
    yield Verdict("tokens of one sequence in training", MILLION, longest, MILLION, at_most=False)


def _on_a_cpu(rows: Sequence[Row]) -> Iterator[Verdict]:
    sizes = _SIZES | {"dtype": "float32", "n": 4096, "batch": 1, "kind": BOTH, "gpu_ms": ""}
    form = {**sizes, "weights": "sampled", "causal": False}
    walls = {row["mechanism"]: number(row, "wall_ms") for row in select(rows, **form)}
    ratio = _ratio(walls.get("released_op"), walls.get("scores_op"))
    what = "on a CPU, released op / op, sampled"
    yield Verdict(what, 4096, ratio, _RELEASED_OP_ON_CPU, at_most=False)
