"""Show what patching would change, before it does."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from primal_attention.attention import card_of
from primal_attention.attention.base.card import Mechanism
from primal_attention.patching.patch import build_layer, resolve_options
from primal_attention.patching.sites import Layers, Site, find_sites, select


class PlannedLayer(NamedTuple):
    """One layer of a plan."""

    name: str
    causal: bool
    parameters_before: int
    parameters_after: int
    cost_after: str  # in the number N of tokens
    state_after: str  # what decoding keeps; empty where there is nothing to decode
    new: tuple[str, ...]  # parameters, or modules of them, that the host does not have
    head_dim: int
    num_directions: int  # 0 of mechanisms without
    options: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """The effects of ``patch`` with the same arguments; print it."""

    model: str
    host: str
    attention: str
    layers: tuple[PlannedLayer, ...]
    num_attentions: int  # of the model, patched or not
    parameters_before: int  # of the whole model

    @property
    def parameters_after(self) -> int:
        """Parameters of the whole model once it is patched."""
        added = sum(layer.parameters_after - layer.parameters_before for layer in self.layers)
        return self.parameters_before + added

    def __str__(self) -> str:
        head = ("layer", "causal", "parameters", "cost", "decode state")
        rows = [head]
        for layer in self.layers:
            parameters = f"{layer.parameters_before:,} -> {layer.parameters_after:,}"
            causal, cost = "yes" if layer.causal else "no", f"N^2 -> {layer.cost_after}"
            rows.append((layer.name, causal, parameters, cost, layer.state_after or "-"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        for line in (self._options, self._new, self._warning):
            lines += dict.fromkeys(text for layer in self.layers if (text := line(layer)))
        lines.append(
            f"parameters of the model: {self.parameters_before:,} -> {self.parameters_after:,}"
        )
        return (
            f"{self.model} ({self.host}): {len(self.layers)} of {self.num_attentions} "
            f"attention layers become {self.attention}\n  "
        ) + "\n  ".join(lines)

    def _options(self, layer: PlannedLayer) -> str:
        return "options: " + ", ".join(f"{name}={value!r}" for name, value in layer.options.items())

    def _new(self, layer: PlannedLayer) -> str:
        if not layer.new:
            return ""
        told = f"new: {', '.join(layer.new)}"
        starts_as_host = card_of(self.attention).softmax_start is not None
        return told if starts_as_host else f"{told}, which start at random: distill or train"

    def _warning(self, layer: PlannedLayer) -> str:
        number, head_dim = layer.num_directions, layer.head_dim
        if number <= head_dim:
            return ""
        return (
            f"warning: num_directions={number} exceeds the head dimension {head_dim}; "
            f"num_directions={head_dim} usually serves as well, with fewer parameters"
        )


def plan(model: nn.Module, attention: str = "primal", layers: Layers = -1, **options: Any) -> Plan:
    """Show what ``patch`` with these arguments would change; the model stays as it is."""
    sites = find_sites(model)
    chosen = select(sites, layers)
    planned = tuple(_planned(site, attention, options) for site in chosen)
    assert chosen[0].host is not None
    return Plan(
        model=type(model).__name__,
        host=chosen[0].host.name,
        attention=attention,
        layers=planned,
        num_attentions=len(sites),
        parameters_before=_count(model),
    )


def _planned(site: Site, attention: str, options: dict[str, Any]) -> PlannedLayer:
    host = site.read().on_meta()
    assert site.host is not None
    resolved = resolve_options(attention, options, host)
    layer = build_layer(site, host, attention, resolved)
    replaced = [site.module, *(site.parent.get_submodule(path) for path in site.host.takes_over)]
    card: Mechanism = layer.mechanism.mechanism
    return PlannedLayer(
        name=site.name,
        causal=layer.causal,
        parameters_before=sum(_count(module) for module in replaced),
        parameters_after=_count(layer),
        cost_after=card.complexity,
        state_after=card.decode if layer.causal else "",
        new=layer.record.new,
        head_dim=int(layer.mechanism.head_dim),
        num_directions=int(getattr(layer.mechanism, "num_directions", 0)),
        options=resolved,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
