"""From spectra to a decision: how many directions a layer needs, and which layers to patch."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from primal_attention.analysis.capture import Data
from primal_attention.analysis.spectrum import LayerSpectrum, Spectrum, check_energy, spectrum
from primal_attention.analysis.text_table import text_table


class LayerSuggestion(NamedTuple):
    """The suggestion for one layer."""

    name: str
    attention: str
    num_directions: int  # the least that explain the energy in the mean
    num_tokens: float  # mean number of keys
    limit: int  # directions that a Primal layer in its place could have
    explained: float  # by ``limit`` directions at most
    patch: bool

    @property
    def reason(self) -> str:
        """Why it is to be patched or not."""
        if self.patch:
            return f"{self.num_directions} of at most {self.limit} directions are enough"
        if self.attention == "primal":
            return "Primal already"
        return f"{self.limit} directions explain {self.explained:.1%} only"

    def cells(self) -> tuple[str, ...]:
        """Return the row of a printed table."""
        tokens, patch = f"{self.num_tokens:.4g}", "yes" if self.patch else "no"
        return self.name, self.attention, tokens, str(self.num_directions), patch, self.reason


@dataclass(frozen=True)
class Suggestion:
    """Numbers of directions and layers to patch; print it."""

    model: str
    energy: float
    layers: tuple[LayerSuggestion, ...]

    @property
    def to_patch(self) -> list[str]:
        """Names for ``patch(model, layers=...)``; empty where no layer is fit for it."""
        return [layer.name for layer in self.layers if layer.patch]

    @property
    def num_directions(self) -> dict[str, int]:
        """The number for every layer by its name."""
        return {layer.name: layer.num_directions for layer in self.layers}

    def __str__(self) -> str:
        columns = ("layer", "attention", "tokens", "directions", "patch", "because")
        title = f"{self.model}: directions for {self.energy:.0%} of the energy, "
        title += f"{len(self.to_patch)} of {len(self.layers)} layers to patch"
        return text_table(title, [columns, *(layer.cells() for layer in self.layers)])


def suggest_directions(
    model: nn.Module, data: Data, energy: float = 0.9, *, max_directions: int | None = None
) -> Suggestion:
    """Suggest how many directions each layer needs, and which layers to patch.

    A layer needs the least number s for which the explained variance of its s leading singular
    values, averaged over heads and sequences, reaches ``energy``. The kernel of a Primal layer with
    one of the fixed feature maps has at most ``head_dim`` singular values, so a layer that needs
    more keeps its attention.

    Args:
        model: As for :func:`~primal_attention.analysis.spectrum`.
        data: As for :func:`~primal_attention.analysis.spectrum`.
        energy: The share of the energy to explain, above 0 and at most 1.
        max_directions: The most directions that a layer may get; its head dimension if None.
    """
    check_energy(energy)
    if max_directions is not None and (not isinstance(max_directions, int) or max_directions < 1):
        raise ValueError(f"max_directions must be an integer, at least 1, got {max_directions!r}")
    return suggestion_from(spectrum(model, data), energy, max_directions=max_directions)


def suggestion_from(
    measured: Spectrum, energy: float = 0.9, *, max_directions: int | None = None
) -> Suggestion:
    """Suggest from spectra that were measured before."""
    layers = tuple(_layer(layer, energy, max_directions) for layer in measured.layers)
    return Suggestion(measured.model, energy, layers)


def _layer(layer: LayerSpectrum, energy: float, max_directions: int | None) -> LayerSuggestion:
    needed = layer.num_directions(energy)
    limit = layer.head_dim if max_directions is None else max_directions
    return LayerSuggestion(
        layer.name,
        layer.attention,
        needed,
        layer.num_tokens.mean,
        limit,
        explained=float(layer.explained[min(limit, len(layer.explained)) - 1]),
        patch=needed <= limit and layer.attention != "primal",
    )
