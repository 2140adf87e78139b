"""Figure 1 of Chen et al. 2023: cumulative explained variance of attention matrices by layer."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from torch import nn

from primal_attention.analysis.capture import Data
from primal_attention.analysis.plot_style import COLOURS, LINE_STYLES, new_figure, plot_shares
from primal_attention.analysis.spectrum import Spectrum, spectrum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 3  # panels of one layer


def figure1(
    softmax: nn.Module, primal: nn.Module, data: Data, *, layers: Sequence[int] | None = None
) -> "Figure":
    """Measure a softmax model and a Primal model on the same data and draw Figure 1.

    Args:
        softmax: The baseline.
        primal: The model with Primal layers.
        data: As for :func:`~primal_attention.analysis.spectrum`; no iterator, it is read twice.
        layers: Up to three layers for panels of their own, by index; first, middle and last if
            None.
    """
    if hasattr(data, "__next__"):
        raise ValueError("data is an iterator, which can be gone through only once; pass a list")
    spectra = {"softmax": spectrum(softmax, data), "Primal": spectrum(primal, data)}
    return plot_spectra(spectra, layers=layers)


def plot_spectra(
    spectra: Mapping[str, Spectrum], *, layers: Sequence[int] | None = None
) -> "Figure":
    """Draw spectra that were measured before, by the name of each model.

    One panel a chosen layer with all models and bands of one standard deviation over heads and
    sequences. The last panel: the means of all layers, deeper ones darker.
    """
    if not spectra:
        raise ValueError("spectra must hold at least one spectrum, got none")
    chosen = _chosen(max(len(each.layers) for each in spectra.values()), layers)
    rows, columns = (2, 2) if len(chosen) == _MOST else (1, len(chosen) + 1)
    figure = new_figure(4.5 * columns, 3.5 * rows)
    *single, last = figure.subplots(rows, columns).flat
    for letter, axes, index in zip("abc", single, chosen, strict=False):
        _draw_layer(axes, spectra, index)
        _finish(axes, f"({letter}) layer {index}")
    _draw_depth(last, spectra)
    _finish(last, f"({'abcd'[len(chosen)]}) all layers")
    return figure


def _chosen(num_layers: int, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return sorted({0, num_layers // 2, num_layers - 1})
    if not 1 <= len(layers) <= _MOST or not all(-num_layers <= i < num_layers for i in layers):
        raise ValueError(
            f"layers must be one to three indices below {num_layers}, got {list(layers)}"
        )
    return [index % num_layers for index in layers]


def _draw_layer(axes: Any, spectra: Mapping[str, Spectrum], index: int) -> None:
    for (name, each), colour in zip(spectra.items(), cycle(COLOURS), strict=False):
        if index < len(each.layers):
            layer = each.layers[index]
            curve = layer.explained.numpy(), layer.explained_deviation.numpy()
            plot_shares(axes, *curve, color=colour, label=f"{name} ({layer.attention})")


def _draw_depth(axes: Any, spectra: Mapping[str, Spectrum]) -> None:
    for place, (name, each) in enumerate(spectra.items()):
        colour, style = COLOURS[place % len(COLOURS)], LINE_STYLES[place % len(LINE_STYLES)]
        for index, layer in enumerate(each.layers, 1):
            depth = index / len(each.layers)
            look = {"color": colour, "linestyle": style, "alpha": 0.25 + 0.75 * depth}
            label = name if depth == 1 else None
            plot_shares(axes, layer.explained.numpy(), label=label, **look)


def _finish(axes: Any, title: str) -> None:
    axes.set(title=title, xlabel="directions", ylabel="cumulative explained variance")
    axes.set_xscale("log", base=2)  # most of a spectrum is in its first directions
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
