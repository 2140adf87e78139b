"""The spectra of a model's attention: one pass over the data, a few numbers a layer."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from primal_attention.analysis.layers import Layer, find_layers
from primal_attention.analysis.matrices import HeadMatrices
from primal_attention.analysis.measures import (
    asymmetry,
    directions_for,
    effective_rank,
    explained_energy,
    head_redundancy,
    row_entropy,
)
from primal_attention.analysis.passes import Data, passes
from primal_attention.analysis.running import Running, Spread
from primal_attention.analysis.text import aligned

ENERGY = 0.9


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
    num_tokens: Spread  # keys
    singular_values: Tensor  # [L], mean
    explained: Tensor  # [L], mean of the cumulative explained variance
    explained_deviation: Tensor  # [L]
    effective_rank: Spread
    directions: Spread  # for 90 % of the energy
    entropy: Spread  # of attention rows, in nats
    asymmetry: Spread
    redundancy: Spread  # over sequences alone

    def num_directions(self, energy: float = ENERGY) -> int:
        """The least number of directions whose mean explained variance is that much."""
        return int(directions_for(self.explained, energy))


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
        lines = [f"{self.model}: spectra of {len(self.layers)} attention layers"]
        lines += [f"  {line}" for line in aligned([COLUMNS, *map(summary, self.layers)])]
        return "\n".join([*lines, *(f"  {name}: {why}" for name, why in self.skipped.items())])


COLUMNS = (
    "layer",
    "attention",
    "tokens",
    "directions for 90 %",
    "effective rank",
    "row entropy",
    "asymmetry",
    "head redundancy",
)


def summary(layer: LayerSpectrum) -> tuple[str, ...]:
    """The cells of one line."""
    spreads = (
        layer.directions,
        layer.effective_rank,
        layer.entropy,
        layer.asymmetry,
        layer.redundancy,
    )
    return layer.name, layer.attention, f"{layer.num_tokens.mean:.4g}", *map(str, spreads)


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
    for layer, run in passes(model, data, layers.found):
        for heads in run.matrices():
            sums[layer.name].add(heads)
    seen = [each.result() for each in sums.values() if each.explained.count]
    if not seen:
        raise ValueError(f"data: no attention layer of {type(model).__name__} saw a real token")
    return Spectrum(type(model).__name__, tuple(seen), layers.skipped)


@dataclass
class _Sums:
    """What is kept of a layer while the data go by."""

    layer: Layer
    singular_values: Running = field(default_factory=Running)
    explained: Running = field(default_factory=lambda: Running(fill=1.0))
    tokens: Running = field(default_factory=Running)
    ranks: Running = field(default_factory=Running)
    directions: Running = field(default_factory=Running)
    entropy: Running = field(default_factory=Running)
    asymmetry: Running = field(default_factory=Running)
    redundancy: Running = field(default_factory=Running)

    @torch.no_grad()
    def add(self, heads: HeadMatrices) -> None:
        """Take in all heads of a sequence."""
        values = heads.singular_values()
        explained = explained_energy(values)
        self.singular_values.add(values)
        self.explained.add(explained)
        for kept, each in (
            (self.tokens, torch.tensor([float(heads.shape[2])])),
            (self.ranks, effective_rank(values)),
            (self.directions, directions_for(explained, ENERGY)),
            (self.entropy, row_entropy(heads)),
            (self.asymmetry, asymmetry(heads)),
            (self.redundancy, head_redundancy(heads)[None]),
        ):
            kept.add(each[:, None])

    def result(self) -> LayerSpectrum:
        """Means and deviations."""
        return LayerSpectrum(
            self.layer.name,
            self.layer.attention,
            self.layer.head_dim,
            self.explained.count,
            self.tokens.spread(),
            self.singular_values.mean,
            self.explained.mean,
            self.explained.deviation,
            self.ranks.spread(),
            self.directions.spread(),
            self.entropy.spread(),
            self.asymmetry.spread(),
            self.redundancy.spread(),
        )


def check_energy(energy: float) -> float:
    """Raise unless it is a share of the energy."""
    if not isinstance(energy, int | float) or not 0 < energy <= 1 or math.isnan(energy):
        raise ValueError(f"energy must be in (0, 1], a share of the energy, got {energy!r}")
    return float(energy)
