"""From the projections of a host's attention to the layer that replaces it, and back."""

from typing import Any

import torch
from torch import nn

from primal_attention.attention import ATTENTIONS, build_attention, card_of, options_of
from primal_attention.attention.base.validation import check_choice
from primal_attention.patching.hosts.host import Change, PatchedAttention, Projections, Record
from primal_attention.patching.sites import Site


def resolve_options(attention: str, options: dict[str, Any], host: Projections) -> dict[str, Any]:
    """All options of the mechanism: those given, and defaults derived from the host."""
    check_choice("attention", attention, ATTENTIONS)
    defaults: dict[str, Any] = {"causal": host.causal, "dropout": host.dropout}
    if "max_tokens" in options_of(attention) and host.max_tokens is not None:
        defaults["max_tokens"] = host.max_tokens
    start = card_of(attention).softmax_start
    if start is not None and not options.keys() & start.keys():
        defaults |= start  # begin as the softmax attention that is replaced
    resolved = defaults | options
    if attention == "primal" and resolved["causal"]:
        resolved.setdefault("weights", "auto")
    return resolved


def build_layer(
    site: Site, host: Projections, attention: str, options: dict[str, Any]
) -> PatchedAttention:
    """Build the mechanism with the projections of the host, behind the signature of the host."""
    assert site.host is not None
    weight = host.q.weight
    with torch.device(weight.device):
        mechanism: Any = build_attention(attention, host.dim, host.num_heads, **options)
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
