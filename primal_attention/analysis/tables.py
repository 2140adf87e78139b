"""Spectra as CSV: one table of layers, one of curves."""

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from primal_attention.analysis.spectrum import LayerSpectrum, Spectrum

_SPREADS = (
    "num_tokens",
    "directions",
    "effective_rank",
    "entropy",
    "asymmetry",
    "redundancy",
)
LAYER_COLUMNS = (
    "model",
    "layer",
    "attention",
    "head_dim",
    "num_matrices",
    *(f"{name}{end}" for name in _SPREADS for end in ("", "_deviation")),
)
CURVE_COLUMNS = (
    "model",
    "layer",
    "attention",
    "direction",
    "singular_value",
    "explained",
    "explained_deviation",
)


def layers_csv(spectra: Mapping[str, Spectrum]) -> str:
    """One row a layer of each model."""
    return _csv(LAYER_COLUMNS, (_numbers(name, layer) for name, layer in _layers(spectra)))


def curves_csv(spectra: Mapping[str, Spectrum]) -> str:
    """One row a direction of each layer of each model."""
    return _csv(CURVE_COLUMNS, (row for each in _layers(spectra) for row in _curve(*each)))


def _layers(spectra: Mapping[str, Spectrum]) -> Iterable[tuple[str, LayerSpectrum]]:
    return [(name, layer) for name, each in spectra.items() for layer in each.layers]


def _numbers(model: str, layer: LayerSpectrum) -> list[Any]:
    spreads = [f"{each:.8g}" for name in _SPREADS for each in getattr(layer, name)]
    return [model, layer.name, layer.attention, layer.head_dim, layer.num_matrices, *spreads]


def _curve(model: str, layer: LayerSpectrum) -> Iterable[list[Any]]:
    columns = layer.singular_values, layer.explained, layer.explained_deviation
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for direction, row in enumerate(rows, 1):
        numbers = [f"{each:.8g}" for each in row]
        yield [model, layer.name, layer.attention, direction, *numbers]


def _csv(columns: Iterable[str], rows: Iterable[list[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
