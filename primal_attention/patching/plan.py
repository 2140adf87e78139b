"""Show what patching would change, before it does."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from primal_attention.attention import card_of
from primal_attention.attention.base.card import Mechanism
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.patch import patch, without_data
from primal_attention.patching.sites import Layers, Site, find_sites, patched_layers, select


class PlannedLayer(NamedTuple):
    """One layer of a plan."""

    name: str
    layer: PatchedAttention  # on the meta device
    parameters_before: int

    @property
    def causal(self) -> bool:
        """True where each token sees only itself and those before it."""
        return self.layer.causal

    @property
    def parameters_after(self) -> int:
        """Parameters of the patched layer."""
        return _count(self.layer)


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
        rows = [("layer", "causal", "parameters", "cost", "decode state")]
        for each in self.layers:
            card: Mechanism = each.layer.mechanism.mechanism
            parameters = f"{each.parameters_before:,} -> {each.parameters_after:,}"
            causal, state = ("yes", card.decode or "-") if each.causal else ("no", "-")
            rows.append((each.name, causal, parameters, f"N^2 -> {card.complexity}", state))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        for line in (_options, _new, _warning):
            lines += dict.fromkeys(text for each in self.layers if (text := line(each.layer)))
        lines.append(
            f"parameters of the model: {self.parameters_before:,} -> {self.parameters_after:,}"
        )
        return (
            f"{self.model} ({self.host}): {len(self.layers)} of {self.num_attentions} "
            f"attention layers become {self.attention}\n  "
        ) + "\n  ".join(lines)


def _options(layer: PatchedAttention) -> str:
    options = layer.record.options.items()
    return "options: " + ", ".join(f"{name}={value!r}" for name, value in options)


def _new(layer: PatchedAttention) -> str:
    if not layer.record.new:
        return ""
    told = f"new: {', '.join(layer.record.new)}"
    starts_as_host = card_of(layer.attention).softmax_start is not None
    return told if starts_as_host else f"{told}, which start at random: distill or train"


def _warning(layer: PatchedAttention) -> str:
    number, head_dim = getattr(layer.mechanism, "num_directions", 0), layer.mechanism.head_dim
    if number <= head_dim:
        return ""
    return (
        f"warning: num_directions={number} exceeds the head dimension {head_dim}; "
        f"num_directions={head_dim} usually serves as well, with fewer parameters"
    )


def plan(model: nn.Module, attention: str = "primal", layers: Layers = -1, **options: Any) -> Plan:
    """Show what ``patch`` with these arguments would change; the model stays as it is."""
    trial = without_data(model)
    sites = find_sites(trial)
    chosen = select(sites, layers)
    before = {site.name: _count_replaced(site) for site in chosen}
    patched = patched_layers(patch(trial, attention, layers, **options))
    assert chosen[0].host is not None
    return Plan(
        model=type(model).__name__,
        host=chosen[0].host.name,
        attention=attention,
        layers=tuple(PlannedLayer(name, patched[name], before[name]) for name in before),
        num_attentions=len(sites),
        parameters_before=_count(model),
    )


def _count_replaced(site: Site) -> int:
    taken_over = site.host.takes_over if site.host else ()
    replaced = [site.module, *(site.parent.get_submodule(path) for path in taken_over)]
    return sum(map(_count, replaced))


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
