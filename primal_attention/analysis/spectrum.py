"""The spectra of a model's attention: one pass over the data, a few numbers a layer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from primal_attention.analysis.capture import AttentionLayer, Data, capture, find_layers
from primal_attention.analysis.matrices import (
    HeadMatrices,
    asymmetry,
    directions_for,
    effective_rank,
    explained_energy,
    head_redundancy,
    row_entropy,
)
from primal_attention.analysis.running_stats import MeanDeviation, RunningStats
from primal_attention.analysis.text_table import text_table

ENERGY = 0.9
SPECTRUM_COLUMNS = (
    "layer",
    "attention",
    "tokens",
    "directions for 90 %",
    "effective rank",
    "row entropy",
    "asymmetry",
    "head redundancy",
)
MEASURES = ("directions", "effective_rank", "entropy", "asymmetry", "redundancy")
Row = dict[str, object]
"""Values of a table by column."""


@dataclass(frozen=True)
class LayerSpectrum:
    """One layer; means and deviations are over heads and sequences.

    Curves have one entry a direction. Where sequences differ in length, a shorter one counts as
    explained (1) and without singular values (0) beyond its end.
    """

    name: str
    attention: str
    head_dim: int
    num_matrices: int  # heads times sequences
    num_tokens: MeanDeviation  # keys
    singular_values: Tensor  # [L], mean
    explained: Tensor  # [L], mean of the cumulative explained variance
    explained_deviation: Tensor  # [L]
    effective_rank: MeanDeviation
    directions: MeanDeviation  # for 90 % of the energy
    entropy: MeanDeviation  # of attention rows, in nats
    asymmetry: MeanDeviation
    redundancy: MeanDeviation  # over sequences alone

    def num_directions(self, energy: float = ENERGY) -> int:
        """Return the least number of directions whose mean explained variance is that much."""
        return int(directions_for(self.explained, energy))

    def cells(self) -> tuple[str, ...]:
        """Return the cells of ``SPECTRUM_COLUMNS``."""
        measures = (str(getattr(self, name)) for name in MEASURES)
        return self.name, self.attention, f"{self.num_tokens.mean:.4g}", *measures


@dataclass(frozen=True)
class Spectrum:
    """The layers of a model, in order; print it."""

    model: str
    layers: tuple[LayerSpectrum, ...]
    skipped: dict[str, str]  # layers without a matrix, and why

    def __getitem__(self, layer: int | str) -> LayerSpectrum:
        """A layer by its place or name."""
        if isinstance(layer, int):
            return self.layers[layer]
        found = [each for each in self.layers if each.name == layer]
        if not found:
            names = ", ".join(each.name for each in self.layers)
            raise KeyError(f"no layer is called {layer!r}; there are {names}")
        return found[0]

    def __str__(self) -> str:
        title = f"{self.model}: spectra of {len(self.layers)} attention layers"
        table = text_table(title, [SPECTRUM_COLUMNS, *(each.cells() for each in self.layers)])
        return "\n".join([table, *(f"  {name}: {why}" for name, why in self.skipped.items())])


def spectrum(model: nn.Module, data: Data) -> Spectrum:
    """Measure the attention or kernel matrices of every layer on the data, in one pass.

    Args:
        model: Any model with attention of this library, of Hugging Face transformers, timm or
            ``torch.nn``, or an attention layer of this library itself.
        data: A batch, which is a tensor, a mapping of arguments of the model (masks among them) or
            a tuple of them; or a list or iterator of batches, of which one is held at a time.
    """
    layers = find_layers(model)
    sums = {layer.name: _Sums(layer) for layer in layers.found}
    for layer, captured in capture(model, data, layers.found):
        for heads in captured.matrices():
            sums[layer.name].add(heads)
    seen = [each.result() for each in sums.values() if each.explained.count]
    if not seen:
        raise ValueError(f"data: no attention layer of {type(model).__name__} saw a real token")
    return Spectrum(type(model).__name__, tuple(seen), layers.skipped)


class _Sums:
    """Running statistics of a layer."""

    def __init__(self, layer: AttentionLayer):
        self.layer = layer
        self.singular_values, self.explained = RunningStats(), RunningStats(fill=1.0)
        self.numbers = {name: RunningStats() for name in ("num_tokens", *MEASURES)}

    @torch.no_grad()
    def add(self, heads: HeadMatrices) -> None:
        """Include all heads of a sequence."""
        values = heads.singular_values()
        explained = explained_energy(values)
        self.singular_values.add(values)
        self.explained.add(explained)
        numbers = {
            "num_tokens": torch.tensor([float(heads.shape[2])]),
            "directions": directions_for(explained, ENERGY),
            "effective_rank": effective_rank(values),
            "entropy": row_entropy(heads),
            "asymmetry": asymmetry(heads),
            "redundancy": head_redundancy(heads)[None],
        }
        for name, each in numbers.items():
            self.numbers[name].add(each[:, None])

    def result(self) -> LayerSpectrum:
        """Means and deviations."""
        return LayerSpectrum(
            name=self.layer.name,
            attention=self.layer.attention,
            head_dim=self.layer.head_dim,
            num_matrices=self.explained.count,
            singular_values=self.singular_values.mean,
            explained=self.explained.mean,
            explained_deviation=self.explained.deviation,
            **{name: each.columns()[0] for name, each in self.numbers.items()},
        )


def check_energy(energy: float) -> None:
    """Raise unless it is a share of the energy."""
    if not isinstance(energy, int | float) or not 0 < energy <= 1:
        raise ValueError(f"energy must be in (0, 1], a share of the energy, got {energy!r}")


def layer_rows(spectra: Mapping[str, Spectrum]) -> list[Row]:
    """Return one row a layer of each model."""
    rows = []
    for model, measured in spectra.items():
        for layer in measured.layers:
            row = _key(model, layer)
            row |= {"head_dim": layer.head_dim, "num_matrices": layer.num_matrices}
            for name in ("num_tokens", *MEASURES):
                mean, deviation = getattr(layer, name)
                row |= {name: f"{mean:.8g}", f"{name}_deviation": f"{deviation:.8g}"}
            rows.append(row)
    return rows


def curve_rows(spectra: Mapping[str, Spectrum]) -> list[Row]:
    """Return one row a direction of each layer of each model."""
    names = "singular_value", "explained", "explained_deviation"
    rows = []
    for model, measured in spectra.items():
        for layer in measured.layers:
            curves = layer.singular_values, layer.explained, layer.explained_deviation
            for place, numbers in enumerate(torch.stack(curves, 1).tolist(), 1):
                texts = (f"{each:.8g}" for each in numbers)
                row = _key(model, layer) | {"direction": place}
                rows.append(row | dict(zip(names, texts, strict=True)))
    return rows


def _key(model: str, layer: LayerSpectrum) -> Row:
    return {"model": model, "layer": layer.name, "attention": layer.attention}
