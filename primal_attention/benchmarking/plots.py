"""Time, memory and the ratio to the floor against the length, as a figure."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from primal_attention.analysis.plot_style import PALETTE, new_figure, save_figure
from primal_attention.benchmarking.registry import BOTH
from primal_attention.benchmarking.results import Row, number, select, time_column

_SIZES = ("dim", "heads", "directions", "dtype")
_NO_LINES = ("copy", "primal_op", "crossover")
_NAMES = {"projections": "bare projections (floor)", "softmax": "softmax (SDPA)"}
_COLOURS = {
    "bare projections (floor)": "black",
    "primal static": PALETTE["sky"],
    "primal sampled": PALETTE["blue"],
    "primal dual": PALETTE["green"],
    "softmax (SDPA)": PALETTE["vermilion"],
    "softmax (SDPA), compiled": PALETTE["orange"],
    "released sampled": PALETTE["purple"],
    "released sampled, wall time": PALETTE["purple"],
    "released static": PALETTE["purple"],
}


class Line(NamedTuple):
    """The values of one form by length."""

    label: str
    causal: bool
    times: dict[int, float]
    peaks: dict[int, float]


def plot(rows: Sequence[Row], path: Path, *, title: str = "") -> None:
    """Draw forward and backward of all mechanisms that the rows have."""
    chosen, sizes = comparable(rows)
    if not chosen:
        raise ValueError("nothing to draw: no row has a time of forward and backward")
    figure = _figure(lines_of(chosen), _rooflines(chosen), f"{title}\n{sizes}".strip(), chosen)
    save_figure(figure, path, bbox_inches="tight")


def comparable(rows: Sequence[Row]) -> tuple[list[Row], str]:
    """Select the rows of forward and backward of the most frequent sizes, and name the sizes."""
    timed = [
        row
        for row in select(rows, kind=BOTH)
        if row["mechanism"] not in _NO_LINES and number(row, "wall_ms") is not None
    ]
    counted = Counter(map(_sizes, timed)).most_common(1)
    if not counted:
        return [], ""
    sizes = counted[0][0]
    dim, heads, directions, dtype, tokens = sizes
    told = f"D={dim}, H={heads}, s={directions}, {dtype}, {int(tokens):,} tokens"
    return [row for row in timed if _sizes(row) == sizes], told


def _sizes(row: Row) -> tuple[str, ...]:
    tokens = int(row["n"]) * int(row["batch"])
    return (*(row[name] for name in _SIZES), str(tokens))


def lines_of(rows: Sequence[Row]) -> list[Line]:
    """Return a line for each form, and one for its compiled form where that was measured."""
    column = time_column(rows)
    lines = []
    for form in dict.fromkeys((r["mechanism"], r["weights"], r["causal"]) for r in rows):
        mechanism, weights, causal = form
        own = select(rows, mechanism=mechanism, weights=weights, causal=causal)
        label = " ".join(filter(None, (_NAMES.get(mechanism, mechanism), weights)))
        shown = column
        if not _by_length(own, column):  # what cannot be captured has the time of its calls only
            shown, label = "wall_ms", f"{label}, wall time"
        for before, name in (("", label), ("compiled_", f"{label}, compiled")):
            times, peaks = (_by_length(own, before + each) for each in (shown, "peak_mib"))
            if len(times) > 1 or (times and not before):
                lines.append(Line(name, causal == "True", times, peaks))
    return lines


def _by_length(rows: Sequence[Row], column: str) -> dict[int, float]:
    cells = {int(row["n"]): number(row, column) for row in rows}
    return {n: cell for n, cell in sorted(cells.items()) if cell is not None}


def _rooflines(rows: Sequence[Row]) -> dict[int, float]:
    """The least time of a layer by length: its input, output and their gradients moved once."""
    return _by_length(select(rows, mechanism="primal"), "roofline_ms")


def _figure(
    lines: Sequence[Line], rooflines: dict[int, float], title: str, rows: Sequence[Row]
) -> Any:
    figure = new_figure(13, 4.4)
    timed, memory, ratio = figure.subplots(1, 3)
    floor = next((line.times for line in lines if line.label == _NAMES["projections"]), {})
    gpu = time_column(rows) == "gpu_ms"
    _draw(timed, lines, lambda line: line.times, "GPU time, ms" if gpu else "time, ms")
    if rooflines:
        timed.plot(*zip(*rooflines.items(), strict=True), ":", color="grey", label="roofline")
    _draw(memory, lines, lambda line: line.peaks, "peak memory, MiB")
    _draw(ratio, lines, lambda line: _over(line.times, floor), "time / time of the projections")
    handles, labels = timed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"One layer, forward and backward. {title}".strip(), fontsize=11)
    return figure


def _draw(
    axes: Any, lines: Sequence[Line], values: Callable[[Line], dict[int, float]], name: str
) -> None:
    for line in lines:
        points = values(line)
        if points:
            style = {"color": _COLOURS.get(line.label), "linestyle": "--" if line.causal else "-"}
            label = f"{line.label}, causal" if line.causal else line.label
            axes.plot(*zip(*points.items(), strict=True), marker="o", ms=4, label=label, **style)
    lengths = sorted({n for line in lines for n in line.times})
    axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel=name)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], minor=False, rotation=30)
    axes.set_xticks([], minor=True)
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(_plain)
    axes.grid(alpha=0.3)


def _plain(value: float, position: int) -> str:
    """Numbers that begin with 1, 2 or 5 without powers of ten; the others would be too many."""
    text = f"{value:g}"
    return text if text.lstrip("0.")[:1] in ("1", "2", "5") else ""


def _over(times: dict[int, float], floor: dict[int, float]) -> dict[int, float]:
    return {n: time / floor[n] for n, time in times.items() if n in floor}
