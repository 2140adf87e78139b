"""Replace attention inside a foreign model, in place, and undo it."""

from typing import Any, TypeVar

from torch import nn

from primal_attention.patching.building import build_layer, install, resolve_options, undo
from primal_attention.patching.description import note_in_config
from primal_attention.patching.hosts.transformers_padding import choose_masks
from primal_attention.patching.sites import Layers, find_sites, patched_layers, select

Model = TypeVar("Model", bound=nn.Module)


def patch(model: Model, attention: str = "primal", layers: Layers = -1, **options: Any) -> Model:
    """Replace attention layers of a model by a mechanism of the registry, in place.

    Query, key, value and output projections are taken over where the mechanism has them. Causal
    hosts get a causal layer; lengths come from the config of the host. Nothing has changed when an
    error is raised.

    Args:
        model: A model of Hugging Face transformers or timm, or with ``nn.MultiheadAttention``.
        attention: A name of ``ATTENTIONS``.
        layers: Which self-attentions, counted from 0 in the order of the model: an index, a list,
            a slice, or ``"all"``, which takes cross-attentions too; or names of modules, with
            wildcards.
        **options: Options of the mechanism, in place of those derived from the host.

    Returns:
        The same model.
    """
    prepared = []
    for site in select(find_sites(model), layers):
        parts = site.read()
        resolved = resolve_options(attention, options, parts)
        prepared.append((site, build_layer(site, parts, attention, resolved)))
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
