"""Figure 1 of Chen et al. 2023: cumulative explained variance of attention matrices by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from primal_attention.analysis.passes import Data
from primal_attention.analysis.spectrum import LayerSpectrum, Spectrum, spectrum
from primal_attention.atomic_files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # Okabe and Ito
_STYLES = ("-", "--", ":", "-.")
_PANELS = 3


def figure1(
    softmax: nn.Module, primal: nn.Module, data: Data, *, layers: Sequence[int] | None = None
) -> Figure:
    """Measure a softmax model and a Primal model on the same data and draw Figure 1.

    Args:
        softmax: The baseline.
        primal: The model with Primal layers.
        data: As for :func:`~primal_attention.analysis.spectrum`; no iterator, it is read twice.
        layers: Up to three layers for (a) to (c), by index; first, middle and last if None.
    """
    if iter_once(data):
        raise ValueError("data is an iterator, which can be gone through only once; pass a list")
    spectra = {"softmax": spectrum(softmax, data), "Primal": spectrum(primal, data)}
    return plot_spectra(spectra, layers=layers)


def plot_spectra(spectra: Mapping[str, Spectrum], *, layers: Sequence[int] | None = None) -> Figure:
    """Draw spectra that were measured before, by the name of each model.

    (a) to (c): one layer each, all models, with bands of one standard deviation over heads and
    sequences. (d): the means of all layers, deeper ones darker.
    """
    figure = _empty_figure()
    if not spectra:
        raise ValueError("spectra must hold at least one spectrum, got none")
    chosen = _chosen(max(len(each.layers) for each in spectra.values()), layers)
    panels = figure.subplots(2, 2)
    *single, last = panels.flat
    for letter, axes, index in zip("abc", single, chosen, strict=False):
        _draw_layer(axes, spectra, index)
        _finish(axes, f"({letter}) layer {index}")
    for axes in single[len(chosen) :]:
        axes.set_axis_off()
    _draw_depth(last, spectra)
    _finish(last, "(d) all layers")
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in one step; half a file is never left behind."""
    with replacing(path) as written:
        figure.savefig(written, format=path.suffix[1:] or "png", dpi=160)


def iter_once(data: Any) -> bool:
    """Whether the data are gone after one look at them."""
    return hasattr(data, "__next__")


def _empty_figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = "figures need matplotlib: pip install 'primal-attention[examples]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return Figure(figsize=(9, 7), layout="constrained")


def _chosen(num_layers: int, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return sorted({0, num_layers // 2, num_layers - 1})
    if not 1 <= len(layers) <= _PANELS or not all(-num_layers <= i < num_layers for i in layers):
        raise ValueError(
            f"layers must be one to three indices below {num_layers}, got {list(layers)}"
        )
    return [index % num_layers for index in layers]


def _draw_layer(axes: Any, spectra: Mapping[str, Spectrum], index: int) -> None:
    for (name, each), colour in zip(spectra.items(), cycle(_COLOURS), strict=False):
        if index < len(each.layers):
            layer = each.layers[index]
            x, mean, deviation = _curve(layer)
            axes.plot(x, mean, color=colour, label=f"{name} ({layer.attention})")
            low, high = (mean - deviation).clip(0, 1), (mean + deviation).clip(0, 1)
            axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_depth(axes: Any, spectra: Mapping[str, Spectrum]) -> None:
    styles = zip(spectra.items(), cycle(_COLOURS), cycle(_STYLES), strict=False)
    for (name, each), colour, style in styles:
        for index, layer in enumerate(each.layers):
            x, mean, _ = _curve(layer)
            depth = (index + 1) / len(each.layers)
            label = name if depth == 1 else None
            axes.plot(x, mean, style, color=colour, alpha=0.25 + 0.75 * depth, label=label)


def _curve(layer: LayerSpectrum) -> tuple[list[int], Any, Any]:
    directions = list(range(1, len(layer.explained) + 1))
    return directions, layer.explained.numpy(), layer.explained_deviation.numpy()


def _finish(axes: Any, title: str) -> None:
    axes.set(title=title, xlabel="directions", ylabel="cumulative explained variance")
    axes.set_xscale("log", base=2)  # most of a spectrum is in its first directions
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
