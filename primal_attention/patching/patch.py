"""Replace attention inside a foreign model, in place, undo it, and describe it as JSON."""

import json
from typing import Any, TypeVar

from torch import nn

from primal_attention.patching.building import build_layer, install, resolve_options, undo
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.hosts.transformers_padding import choose_masks
from primal_attention.patching.sites import Layers, Site, find_sites, patched_layers, select

Model = TypeVar("Model", bound=nn.Module)

FORMAT = "primal-attention patch 1"
KEY = "primal_attention"


def patch(model: Model, attention: str = "primal", layers: Layers = -1, **options: Any) -> Model:
    """Replace attention layers of a model by a mechanism of the registry, in place.

    Query, key, value and output projections are taken over where the mechanism has them. Causal
    hosts get a causal layer; lengths come from the config of the host. New parameters are random:
    ``distill`` or train the model. Nothing has changed when an error is raised.

    Args:
        model: A model of Hugging Face transformers or timm, with ``nn.MultiheadAttention``, or of
            a family that was made known with ``register_host``.
        attention: A name of ``ATTENTIONS``.
        layers: The self-attentions to replace, counted from 0 in the order of the model: an index,
            a list, a slice, or ``"all"``, which takes cross-attentions too; or names of modules,
            with wildcards.
        **options: Options of the mechanism, in place of those derived from the host.

    Returns:
        The same model.
    """
    prepared = []
    for site in select(find_sites(model), layers):
        host = site.read()
        resolved = resolve_options(attention, options, host)
        prepared.append((site, build_layer(site, host, attention, resolved)))
    for site, layer in prepared:
        install(site, layer)
    choose_masks(model)
    note_in_config(model)
    return model


def unpatch(model: Model) -> Model:
    """Put the original attention back into every patched layer, bit for bit, in place."""
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no patched layer")
    for name, layer in layers.items():
        undo(name, layer)
    choose_masks(model)
    note_in_config(model)
    return model


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
    """Build the layers of a description, each with its place in a model, which stays as it is.

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
        host = site.read()
        host = host.on_meta() if on_meta else host
        layers.append((site, build_layer(site, host, attention, options)))
    return layers


def note_in_config(model: nn.Module) -> None:
    """Write the description into the config of a transformers model, which saves it too."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    description = describe(model)
    try:
        json.dumps(description)
    except TypeError:  # an option that no file can hold
        description["layers"] = []
    if description["layers"]:
        setattr(config, KEY, description)
    elif hasattr(config, KEY):
        delattr(config, KEY)
