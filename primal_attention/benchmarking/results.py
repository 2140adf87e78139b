"""Results: one row a measurement in a CSV file named by card, torch version and date."""

import datetime
import math
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from primal_attention.atomic_files import write_rows
from primal_attention.benchmarking.clocks import Copy
from primal_attention.benchmarking.measurement import Measurement
from primal_attention.benchmarking.registry import ENTRIES, Job
from primal_attention.training.results import Row, read_table

KEY = (
    *("mechanism", "weights", "causal", "n", "batch", "dim", "heads", "directions", "dtype"),
    "pass",
)
_NEEDED = (*KEY, "gpu_ms", "wall_ms", "peak_mib", "commit")
COLUMNS = (
    *KEY,
    *("gpu_ms", "wall_ms", "peak_mib"),
    *("compiled_gpu_ms", "compiled_wall_ms", "compiled_peak_mib"),
    *("least_mib", "roofline_ms", "copy_share"),
    *("commit", "note"),
)
CROSSOVER = "crossover"


def number(row: Mapping[str, str], column: str) -> float | None:
    """Return the number in a cell; None where there is none."""
    text = row.get(column) or ""
    return None if text in ("", "nan") else float(text)


def time_column(rows: Iterable[Mapping[str, str]]) -> str:
    """Return the column of the time that counts: GPU time, or on a CPU the time of the call."""
    measured = any(number(row, "gpu_ms") is not None for row in rows)
    return "gpu_ms" if measured else "wall_ms"


def row_of(job: Job, measurement: Measurement, copy: Copy, commit: str) -> Row:
    """Return the cells that a measurement fills."""
    entry, sizes = ENTRIES[job.name], job.sizes
    row = {"mechanism": entry.mechanism, "weights": entry.weights, "causal": str(entry.causal)}
    row |= {name: str(value) for name, value in sizes._asdict().items()}
    row |= {"pass": job.kind, "commit": commit}
    before = "compiled_" if job.compiled else ""
    row |= {
        f"{before}gpu_ms": _ms(measurement.gpu_ms),
        f"{before}wall_ms": _ms(measurement.wall_ms),
        f"{before}peak_mib": _mib(measurement.peak_mib),
    }
    if measurement.note:
        row["note"] = f"compiled: {measurement.note}" if job.compiled else measurement.note
    if measurement.moved is not None and not job.compiled:
        row |= _roofline(measurement, copy)
    return row


def _roofline(measurement: Measurement, copy: Copy) -> Row:
    assert measurement.moved is not None
    least = measurement.moved / copy.rate
    time = measurement.gpu_ms if copy.gpu_ms is not None else measurement.wall_ms
    share = f"{least / time:.4f}" if time is not None and time > 0 else ""
    moved = _mib(measurement.moved / 2**20)
    return {"least_mib": moved, "roofline_ms": _ms(least), "copy_share": share}


def copy_row(copy: Copy, commit: str) -> Row:
    """Return the row of the plain copy that the others are compared with."""
    copied = Measurement(copy.gpu_ms, copy.wall_ms, None, copy.moved)
    row = {"mechanism": "copy", "pass": "fwd", "commit": commit}
    row |= {"gpu_ms": _ms(copied.gpu_ms), "wall_ms": _ms(copied.wall_ms)}
    return row | _roofline(copied, copy)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _mib(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return the key of a measurement; a crossover is found anew at another length."""
    without = ("n", "batch") if row["mechanism"] == CROSSOVER else ()
    return tuple("" if name in without else row.get(name) or "" for name in KEY)


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file of results."""
    return read_table(path, _NEEDED)[1]


class Results:
    """Rows as they come; with a file, all of them are in it after each.

    A row of the file that is measured again is replaced; what a second measurement adds to a row
    of this run (the compiled form) is added to it.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._before = read_rows(path) if path is not None and path.exists() else []
        self._rows: dict[tuple[str, ...], Row] = {}

    @property
    def rows(self) -> list[Row]:
        """Rows of this run."""
        return list(self._rows.values())

    def add(self, row: Row) -> None:
        """Add cells to a row, and write the file."""
        known = self._rows.setdefault(key_of(row), dict.fromkeys(COLUMNS, ""))
        note = "; ".join(filter(None, (known["note"], row.get("note", ""))))
        known.update(row, note=note)
        if self.path is not None:
            kept = [row for row in self._before if key_of(row) not in self._rows]
            rows = [{name: row.get(name, "") for name in COLUMNS} for row in kept]
            write_rows(self.path, [*rows, *self.rows])


def results_path(folder: Path, device: torch.device) -> Path:
    """``<card>_torch<version>_<date>.csv`` in a folder."""
    date = datetime.datetime.now(datetime.UTC).date()
    return folder / f"{card_name(device)}_torch{torch.__version__.split('+')[0]}_{date}.csv"


def card_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor's kind."""
    if device.type != "cuda":
        return f"{platform.machine()}-cpu"
    name = torch.cuda.get_device_name(device)
    return name.replace("NVIDIA ", "").replace(" ", "-").lower()


def select(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """Select the rows with these cells; ``kind`` stands for the column ``pass``."""
    cells = {"pass" if name == "kind" else name: str(value) for name, value in wanted.items()}
    return [row for row in rows if all(row.get(name) == value for name, value in cells.items())]


_SAME = ("causal", "dim", "heads", "directions", "dtype", "pass")


class Crossover(NamedTuple):
    """The length from which one form is faster than softmax attention."""

    length: float | None  # None: nowhere that was measured
    note: str


def crossover(ours: dict[int, float], theirs: dict[int, float]) -> Crossover:
    """Find the smallest length from which on ours is faster, from times by length.

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
    """Yield a row for each form of Primal-Attention, pass and choice of sizes; n is the length."""
    column = time_column(rows)
    primal, softmax = (select(rows, mechanism=name) for name in ("primal", "softmax"))
    for weights, form in dict.fromkeys((row["weights"], _form(row)) for row in primal):
        ours = [row for row in primal if (row["weights"], _form(row)) == (weights, form)]
        theirs = [row for row in softmax if _form(row) == form]
        if theirs:
            found = crossover(_times(ours, column), _times(theirs, column))
            length = "" if found.length is None else str(round(found.length))
            sizes = dict(zip(_SAME, form, strict=False))
            about = {"commit": ours[0]["commit"], "note": f"against softmax: {found.note}"}
            yield {**sizes, "mechanism": CROSSOVER, "weights": weights, "n": length, **about}


def _form(row: Row) -> tuple[str, ...]:
    """Return the sizes but for the length, and the tokens in all: both forms must share them."""
    return (*(row[name] for name in _SAME), str(int(row["n"]) * int(row["batch"])))


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
