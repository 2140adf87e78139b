"""What was patched in a model, as JSON: it goes with the weights wherever they are saved."""

import json
from typing import Any

from torch import nn

from primal_attention.patching.adapter import PatchedAttention
from primal_attention.patching.building import build_layer, install
from primal_attention.patching.sites import Site, find_sites, patched_layers

FORMAT = "primal-attention patch 1"
KEY = "primal_attention"


def describe(model: nn.Module) -> dict[str, Any]:
    """The patched layers of a model: where, which mechanism, with which options."""
    layers = [
        {"name": name, "attention": layer.record.attention, "options": layer.record.options}
        for name, layer in patched_layers(model).items()
    ]
    return {"format": FORMAT, "layers": layers}


def apply_description(model: nn.Module, description: Any) -> None:
    """Patch a model as described, with new weights that are to be overwritten.

    Nothing has changed when an error is raised.
    """
    for site, layer in described_layers(model, description):
        install(site, layer)
        layer.record.changes.clear()


def described_layers(
    model: nn.Module, description: Any, *, on_meta: bool = False
) -> list[tuple[Site, PatchedAttention]]:
    """The layers of a description, each with its place in a model, which stays as it is.

    Args:
        model: The model.
        description: From ``describe``.
        on_meta: Build the layers on the ``meta`` device, where they take no memory.
    """
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise ValueError(f"not a description of patched layers ({FORMAT}): {description!r}")
    sites = {site.name: site for site in find_sites(model)}
    layers = []
    for entry in description["layers"]:
        name, attention, options = (entry[key] for key in ("name", "attention", "options"))
        if name not in sites:
            raise ValueError(
                f"{type(model).__name__} has no attention at {name}; it has {', '.join(sites)}"
            )
        site = sites.pop(name)
        parts = site.read()
        parts = parts.on_meta() if on_meta else parts
        layers.append((site, build_layer(site, parts, attention, options)))
    return layers


def note_in_config(model: nn.Module) -> None:
    """Write the description into the config of a transformers model, so that it saves it too."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    description = describe(model)
    if description["layers"] and _is_json(description):
        setattr(config, KEY, description)
    elif hasattr(config, KEY):
        delattr(config, KEY)


def _is_json(description: dict[str, Any]) -> bool:
    try:
        json.dumps(description)
    except TypeError:
        return False
    return True
