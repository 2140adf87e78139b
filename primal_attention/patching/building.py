"""From the parts of a host's attention to the layer that replaces it."""

from typing import Any

import torch
from torch import nn

from primal_attention.attention import ATTENTIONS, build_attention, card_of, options_of
from primal_attention.attention.base.validation import check_choice
from primal_attention.patching.adapter import Change, PatchedAttention, Record
from primal_attention.patching.crossing import check_crossing
from primal_attention.patching.projections import Parts
from primal_attention.patching.sites import Site


def resolve_options(attention: str, options: dict[str, Any], parts: Parts) -> dict[str, Any]:
    """All options of the mechanism: those given, and what the host says of the others."""
    check_choice("attention", attention, ATTENTIONS)
    known = options_of(attention)
    defaults: dict[str, Any] = {"causal": parts.causal, "dropout": parts.dropout}
    if "max_tokens" in known and parts.max_tokens is not None:
        defaults["max_tokens"] = parts.max_tokens
    start = card_of(attention).softmax_start
    if start is not None and not options.keys() & start.keys():
        defaults |= start  # begin as the softmax attention that is replaced
    resolved = defaults | options
    if attention == "primal" and resolved["causal"]:
        resolved.setdefault("weights", "auto")
    return resolved


def build_layer(
    site: Site, parts: Parts, attention: str, options: dict[str, Any]
) -> PatchedAttention:
    """The mechanism with the projections of the host, behind the signature of the host."""
    assert site.host is not None
    weight = parts.q.weight
    with torch.device(weight.device):
        mechanism: Any = build_attention(attention, parts.dim, parts.num_heads, **options)
    if parts.cross:
        check_crossing(attention, mechanism)
    mechanism.to(weight.dtype)
    for name, affine in zip("qkv", (parts.q, parts.k, parts.v), strict=True):
        for own in (f"{name}_proj", f"{name}_global"):
            if hasattr(mechanism, own):
                setattr(mechanism, own, affine.linear())
    mechanism.out_proj = parts.out.linear()
    layer = site.host.adapt(site.module, mechanism)
    layer.train(site.module.training)
    layer.record = Record(site.host.name, attention, options, parts.cross)
    return layer


def install(site: Site, layer: PatchedAttention) -> None:
    """Put a layer in its place and note in it how to undo that."""
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
    """Put back what stood in the place of a layer, where the layer is now."""
    if not layer.record.changes:
        raise ValueError(
            f"{name} cannot be unpatched: it was loaded from a file, which does not hold the "
            "weights that it replaced"
        )
    for owner, attribute, old in layer.record.changes:
        if isinstance(old, nn.Module):
            _follow(old, layer)
        setattr(owner, attribute, old)


def _follow(module: nn.Module, layer: PatchedAttention) -> None:
    """Bring a module to the mode, and to the device and dtype if they have changed."""
    module.train(layer.training)
    mine, its = next(module.parameters()), next(layer.parameters())
    if (mine.device, mine.dtype) != (its.device, its.dtype):
        module.to(its.device, its.dtype)
