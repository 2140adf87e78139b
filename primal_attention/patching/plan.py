"""What patching would change, before it does."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.patching.building import build_layer, resolve_options
from primal_attention.patching.projections import Parts
from primal_attention.patching.sites import Layers, Site, find_sites, select


class PlannedLayer(NamedTuple):
    """One layer of a plan."""

    name: str
    causal: bool
    parameters_before: int
    parameters_after: int
    cost_before: str  # in the number N of tokens
    cost_after: str
    state_after: str  # what decoding keeps; empty where there is nothing to decode
    options: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What ``patch`` with the same arguments would do; print it."""

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
        rows = [head, *(_row(layer) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(
            [
                f"{self.model} ({self.host}): {len(self.layers)} of {self.num_attentions} "
                f"attention layers become {self.attention}",
                *(f"  {line}" for line in lines),
                *(f"  options: {line}" for line in dict.fromkeys(map(_options, self.layers))),
                f"  parameters of the model: {self.parameters_before:,} -> "
                f"{self.parameters_after:,}",
            ]
        )


def plan(model: nn.Module, attention: str = "primal", layers: Layers = -1, **options: Any) -> Plan:
    """What ``patch`` with these arguments would change; the model stays as it is."""
    sites = find_sites(model)
    chosen = select(sites, layers)
    planned = tuple(_planned(site, site.read().on_meta(), attention, options) for site in chosen)
    assert chosen[0].host is not None
    return Plan(
        model=type(model).__name__,
        host=chosen[0].host.name,
        attention=attention,
        layers=planned,
        num_attentions=len(sites),
        parameters_before=_count(model),
    )


def _planned(site: Site, parts: Parts, attention: str, options: dict[str, Any]) -> PlannedLayer:
    assert site.host is not None
    resolved = resolve_options(attention, options, parts)
    layer = build_layer(site, parts, attention, resolved)
    replaced = [site.module, *(site.parent.get_submodule(path) for path in site.host.takes_over)]
    mechanism: Mechanism = layer.mechanism.mechanism
    return PlannedLayer(
        name=site.name,
        causal=layer.causal,
        parameters_before=sum(_count(module) for module in replaced),
        parameters_after=_count(layer),
        cost_before="N^2",
        cost_after=mechanism.complexity,
        state_after=mechanism.decode if layer.causal else "",
        options=resolved,
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _row(layer: PlannedLayer) -> tuple[str, ...]:
    return (
        layer.name,
        "yes" if layer.causal else "no",
        f"{layer.parameters_before:,} -> {layer.parameters_after:,}",
        f"{layer.cost_before} -> {layer.cost_after}",
        layer.state_after or "-",
    )


def _options(layer: PlannedLayer) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in layer.options.items())
