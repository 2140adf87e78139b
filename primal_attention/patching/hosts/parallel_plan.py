"""The tensor-parallel plan of a transformers model, without its attentions once one is patched."""

from torch import nn

from primal_attention.patching.adapter import Change


def plans_without(attention: nn.Module, ancestors: list[nn.Module]) -> list[Change]:
    """The plans of the models above an attention, less all that they say of such attentions.

    A plan names modules with a wildcard for the number of the layer, so that it cannot tell patched
    layers from others. Its attentions are then whole on each device; the rest is split as before.
    """
    changes = []
    for model in ancestors:
        plan = getattr(model, "_tp_plan", None)
        if isinstance(plan, dict):
            place = next(name for name, each in model.named_modules() if each is attention)
            parts = ["*" if part.isdigit() else part for part in place.split(".")]
            prefix = ".".join([*parts, ""])
            kept = {name: style for name, style in plan.items() if not name.startswith(prefix)}
            if len(kept) < len(plan):
                changes.append(Change(model, "_tp_plan", kept))
    return changes
