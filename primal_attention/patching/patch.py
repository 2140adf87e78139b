"""Replace attention inside a foreign model, in place, undo it, and describe it as JSON."""

import json
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from primal_attention.attention import ATTENTIONS, build_attention, card_of, options_of
from primal_attention.attention.base.validation import check_choice
from primal_attention.patching.hosts.host import Change, PatchedAttention, Projections, Record
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
            a list, a slice, or ``"all"``, which takes cross-attentions too and leaves out those
            with a sliding window; or names of modules, with wildcards.
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
    """Describe the patched layers of a model: where, which mechanism, with which options."""
    layers = [
        {"name": name, "attention": layer.record.attention, "options": layer.record.options}
        for name, layer in patched_layers(model).items()
    ]
    return {"format": FORMAT, "layers": layers}


def apply_description(model: nn.Module, description: Any) -> None:
    """Patch a model as described, with new weights that are to be overwritten.

    Nothing has changed when an error is raised.
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
        layers.append((site, build_layer(site, site.read(), attention, options)))
    for site, layer in layers:
        install(site, layer)
        layer.record.changes.clear()


def without_data(model: Model) -> Model:
    """Copy a model onto the ``meta`` device, where it takes no memory; tied tensors stay tied."""
    tensors = {id(tensor): tensor.to("meta") for tensor in model.buffers()}
    for parameter in model.parameters():
        tensors[id(parameter)] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
    return deepcopy(model, tensors)


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


def resolve_options(attention: str, options: dict[str, Any], host: Projections) -> dict[str, Any]:
    """Return all options of the mechanism: the given ones, and defaults derived from the host."""
    check_choice("attention", attention, ATTENTIONS)
    defaults: dict[str, Any] = {"causal": host.causal, "dropout": host.dropout}
    if "max_tokens" in options_of(attention) and host.max_tokens is not None:
        defaults["max_tokens"] = host.max_tokens
    card = card_of(attention)
    start = card.softmax_start
    if start is not None and not options.keys() & start.keys():
        defaults |= start  # begin as the softmax attention that is replaced
    resolved = defaults | options
    if resolved["causal"]:
        resolved = resolved | {k: v for k, v in card.causal_patch.items() if k not in resolved}
    return resolved


def build_layer(
    site: Site, host: Projections, attention: str, options: dict[str, Any]
) -> PatchedAttention:
    """Build the mechanism with the projections of the host, behind the signature of the host."""
    assert site.host is not None
    weight = host.q.weight
    inner = weight.shape[0]  # channels of all heads
    with torch.device(weight.device):
        mechanism: Any = build_attention(attention, inner, host.num_heads, **options)
        if inner != host.dim:
            read_tokens(mechanism, host.dim)
    mechanism.to(weight.dtype)
    copied = {"out_proj": host.out}
    for name, affine in zip("qkv", (host.q, host.k, host.v), strict=True):
        copied |= {f"{name}_proj": affine, f"{name}_global": affine}
    copied = {name: affine for name, affine in copied.items() if hasattr(mechanism, name)}
    for name, affine in copied.items():
        setattr(mechanism, name, affine.linear())
    parts = dict.fromkeys(name.partition(".")[0] for name, _ in mechanism.named_parameters())
    new = tuple(name for name in parts if name not in copied)
    layer = site.host.adapt(site.module, mechanism)
    layer.train(site.module.training)
    layer.record = Record(attention, options, host.cross, new)
    if host.cross:
        layer.check_cross()
    return layer


def read_tokens(mechanism: Any, dim: int) -> None:
    """Let a mechanism whose heads have more or fewer channels in all read tokens of ``dim``."""
    if getattr(mechanism, "weights", "") == "sampled":
        raise ValueError(
            f"weights='sampled' slices the tokens by head, but the heads have {mechanism.dim} "
            f"channels in all in a model of dimension {dim}; use weights='dual'"
        )
    mechanism.dim = dim
    for name in ("h_proj", "gate_proj", "decay_proj"):
        if hasattr(mechanism, name):
            projection = getattr(mechanism, name)
            projection.in_features = dim
            projection.weight = nn.Parameter(torch.empty(projection.out_features, dim))
            projection.reset_parameters()


def install(site: Site, layer: PatchedAttention) -> None:
    """Put a layer in its place and record how to undo that."""
    assert site.host is not None
    changes = site.host.settings(site.module, site.ancestors)
    for path in site.host.takes_over:
        holder, _, attribute = path.rpartition(".")
        changes.append(Change(site.parent.get_submodule(holder), attribute, nn.Identity()))
    changes.append(Change(site.parent, site.name.rpartition(".")[2], layer))
    for owner, attribute, new in changes:
        old = getattr(owner, attribute)
        if old is not new:
            layer.record.changes.append(Change(owner, attribute, old))
            setattr(owner, attribute, new)


def undo(name: str, layer: PatchedAttention) -> None:
    """Restore what the layer replaced, in the present mode, device and dtype of the layer."""
    if not layer.record.changes:
        raise ValueError(
            f"{name} cannot be unpatched: it was loaded from a file, which does not hold the "
            "weights that it replaced"
        )
    for owner, attribute, old in layer.record.changes:
        if isinstance(old, nn.Module):
            old.train(layer.training)
            mine, its = next(old.parameters()), next(layer.parameters())
            if (mine.device, mine.dtype) != (its.device, its.dtype):
                old.to(its.device, its.dtype)
        setattr(owner, attribute, old)
