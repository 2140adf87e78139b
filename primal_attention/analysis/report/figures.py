"""The drawings of a report, as SVG in data addresses, for a light page and for a dark one."""

import base64
import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from primal_attention.analysis import plot_style
from primal_attention.analysis.duality import LayerDuality
from primal_attention.analysis.report.html import Picture
from primal_attention.analysis.spectrum import ENERGY, LayerSpectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK, _PALE = "#1f2933", "#e4e8ec"  # of everything that is not data, on a light and a dark page
_WIDTH, _HEIGHT = 4.8, 3.2
_MARKED = 30  # rounds up to which each is a dot
_LEGEND = 8  # lines up to which a legend is of use
_NUMBERED = 15  # classes up to which the matrix has numbers in it
_LETTERS, _FEW_LETTERS = 34, 20  # of a name, in a legend and beside an axis
_NOISE = 1e-8  # singular values over the first that are not drawn


class Curve(NamedTuple):
    """A line of numbers; ``best`` is the place that is marked."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    best: int | None = None


def draw_curves(curves: Sequence[Curve], xlabel: str, ylabel: str) -> Picture:
    """Curves over the rounds of a run; the best rounds are marked."""
    figure, axes = _figure(_WIDTH, _HEIGHT)
    for place, (name, x, y, best) in enumerate(curves):
        colour, style = plot_style.LINES[place % len(plot_style.LINES)]
        mark = "." if len(x) <= _MARKED else ""
        axes.plot(x, y, style, marker=mark, color=colour, label=_plain(name), linewidth=1.6)
        if best is not None:
            axes.plot(x[best], y[best], "o", color=colour, markersize=8, fillstyle="none")
            if len(curves) <= 2:
                axes.axvline(x[best], color=_INK, alpha=0.35, linewidth=0.8, linestyle="--")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finished(figure, axes, legend=len(curves) > 1)


def draw_explained(layers: Mapping[str, LayerSpectrum], title: str = "") -> Picture:
    """Cumulative explained variance of layers by name, with bands of one deviation."""
    figure, axes = _figure(_WIDTH, _HEIGHT)
    for (name, layer), colour in zip(
        layers.items(), plot_style.colours_by_depth(len(layers)), strict=True
    ):
        deviation = layer.explained_deviation.numpy() if len(layers) <= _LEGEND else None
        style = {"color": colour, "label": _plain(name), "linewidth": 1.6}
        plot_style.plot_shares(axes, layer.explained.numpy(), deviation, **style)
    axes.axhline(ENERGY, color=_INK, alpha=0.35, linewidth=0.8, linestyle="--")
    axes.set(xlabel="directions", ylabel="explained variance", title=_plain(title))
    axes.set_ylim(top=1.005)
    return _finished(figure, axes, legend=len(layers) <= _LEGEND)


def draw_singular_values(layers: Mapping[str, LayerSpectrum]) -> Picture:
    """Mean singular values of layers by name, over the first of each."""
    figure, axes = _figure(_WIDTH, _HEIGHT)
    for (name, layer), colour in zip(
        layers.items(), plot_style.colours_by_depth(len(layers)), strict=True
    ):
        relative = layer.singular_values / (float(layer.singular_values[0]) or 1.0)
        drawn = relative.where(relative > _NOISE, math.nan).numpy()
        plot_style.plot_shares(axes, drawn, color=colour, label=_plain(name), linewidth=1.6)
    axes.set(xlabel="direction", ylabel="singular value / first", yscale="log")
    return _finished(figure, axes, legend=len(layers) <= _LEGEND)


def draw_energies(layers: Sequence[LayerDuality]) -> Picture:
    """Draw the energy that directions of Primal layers explain, beside the most possible."""
    figure, axes = _figure(_WIDTH, 1.2 + 0.75 * len(layers))
    bars = {"best": "best possible", "subspaces": "by its subspaces", "explained": "explained"}
    for place, (field, label) in enumerate(bars.items()):
        values = [getattr(layer, field).mean for layer in layers]
        y = [index + 0.26 * (place - 1) for index in range(len(layers))]
        shown = [min(max(value, 0.0), 1.0) for value in values]
        axes.barh(y, shown, height=0.24, color=plot_style.COLOURS[place], label=label)
        for where, width, value in zip(y, shown, values, strict=True):
            axes.text(width + 0.01, where, f"{value:.2g}", va="center", fontsize=8, color=_INK)
    axes.set_yticks(range(len(layers)), [_plain(_end(layer.name)) for layer in layers])
    axes.set(xlabel="share of the energy of the kernel matrix", xlim=(0, 1.12))
    axes.invert_yaxis()
    return _finished(figure, axes, legend=True, below=True)


def draw_confusion(confusion: Tensor, labels: Sequence[str]) -> Picture:
    """Cases of a class (rows) by what they were taken for, shaded by the root of their share."""
    count = len(labels)
    side = min(max(3.2, 0.42 * count + 1.4), 8.0)
    figure, axes = _figure(side + 0.6, side)
    shares = confusion / confusion.sum(1, keepdim=True).clamp(min=1)
    blue = [int(plot_style.PALETTE["blue"][place : place + 2], 16) / 255 for place in (1, 3, 5)]
    axes.imshow([[(*blue, share**0.5) for share in row] for row in shares.tolist()])
    if count <= _NUMBERED:
        for i, row in enumerate(confusion.tolist()):
            for j, number in enumerate(row):
                strong = "#ffffff" if shares[i, j] > 0.4 else _INK
                text = str(number) if number else ""
                axes.text(j, i, text, ha="center", va="center", color=strong, fontsize=8)
    every = range(0, count, math.ceil(count / 40))
    names = [_plain(labels[i], _FEW_LETTERS) for i in every]
    upright = 0 if all(len(name) <= 3 for name in names) and count <= _NUMBERED else 90
    axes.set_xticks(every, names, rotation=upright, fontsize=8)
    axes.set_yticks(every, names, fontsize=8)
    axes.set(xlabel="taken for", ylabel="class")
    return _picture(figure)


def _figure(width: float, height: float) -> tuple["Figure", Any]:
    figure = plot_style.new_figure(width, height)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.tick_params(color=_INK, labelcolor=_INK)
    for part in (axes.xaxis.label, axes.yaxis.label, axes.title):
        part.set_color(_INK)
    for name, spine in axes.spines.items():
        spine.set(color=_INK, alpha=0.5, visible=name in ("left", "bottom"))
    return figure, axes


def _finished(figure: "Figure", axes: Any, *, legend: bool, below: bool = False) -> Picture:
    axes.grid(color=_INK, alpha=0.12)
    axes.set_axisbelow(True)
    if legend and below:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=_INK)
    elif legend:
        axes.legend(frameon=False, labelcolor=_INK, fontsize=8)
    return _picture(figure)


def _picture(figure: "Figure") -> Picture:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "report"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # of a script that the font lacks
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    light = text.getvalue()
    return Picture(_address(light), _address(light.replace(_INK, _PALE)))


def _address(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _end(path: str) -> str:
    """Shorten a path to its end, in which the layers of a model differ."""
    return path if len(path) <= _FEW_LETTERS else f"…{path[-_FEW_LETTERS:]}"


def _plain(text: str, letters: int = _LETTERS) -> str:
    """A name without signs that a drawing would read as formulas, and not too long."""
    half = letters // 2
    short = text if len(text) <= letters else f"{text[: half - 1]}…{text[-half:]}"
    shown = "".join(each if each.isprintable() else "?" for each in short)
    return shown.replace("$", r"\$").removeprefix("_")
