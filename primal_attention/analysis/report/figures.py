"""The drawings of a report, as SVG in data addresses."""

import base64
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from primal_attention.analysis.plot_style import LINES, new_figure
from primal_attention.extras import needing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKED = 30  # rounds up to which each is a dot
_NUMBERED = 15  # classes up to which the matrix has numbers in it
_NAMED = 40  # classes of which the matrix names each
_LETTERS = 20  # of the name of a class


class Curve(NamedTuple):
    """A line of numbers; ``best`` is the place that is marked."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    best: int | None = None


@contextmanager
def drawing() -> Iterator[None]:
    """Draw names as they are, not as formulas, and the same page from the same numbers."""
    with needing("figures need matplotlib", "train"):
        from matplotlib import rc_context
    with (
        rc_context({"svg.hashsalt": "report", "text.parse_math": False}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Glyph")  # of a script that the font lacks
        yield


def address(figure: "Figure") -> str:
    """Write a figure into a data address."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.getvalue()).decode()}"


def draw_curves(curves: Sequence[Curve], xlabel: str, ylabel: str) -> str:
    """Draw curves over the rounds of a run; the best rounds are marked."""
    figure = new_figure(4.8, 3.2)
    axes: Any = figure.add_subplot()
    for place, (name, x, y, best) in enumerate(curves):
        colour, style = LINES[place % len(LINES)]
        mark = "." if len(x) <= _MARKED else ""
        axes.plot(x, y, style, marker=mark, color=colour, label=name)
        if best is not None:
            axes.plot(x[best], y[best], "o", color=colour, markersize=8, fillstyle="none")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(fontsize=8)
    return address(figure)


def draw_confusion(confusion: Tensor, labels: Sequence[str]) -> str:
    """Draw cases of a class (rows) by predicted class, shaded by the root of their share."""
    count = len(labels)
    side = min(max(3.2, 0.42 * count + 1.4), 8.0)
    figure = new_figure(side + 0.6, side)
    axes = figure.add_subplot()
    shares = (confusion / confusion.sum(1, keepdim=True).clamp(min=1)).sqrt()
    axes.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    if count <= _NUMBERED:
        for i, j in confusion.nonzero().tolist():
            colour = "white" if shares[i, j] > 0.6 else "black"
            number = str(int(confusion[i, j]))
            axes.text(j, i, number, ha="center", va="center", color=colour, fontsize=8)
    every = range(0, count, -(-count // _NAMED))
    names = ["".join(c if c.isprintable() else "?" for c in labels[i][:_LETTERS]) for i in every]
    axes.set_xticks(every, names, rotation=90, fontsize=8)
    axes.set_yticks(every, names, fontsize=8)
    axes.set(xlabel="predicted class", ylabel="class")
    return address(figure)
