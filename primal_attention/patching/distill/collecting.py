"""What the replaced attentions of a teacher are given and give, seen through hooks.

Letters: B batch, N tokens, D model dim.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.hosts.transformers_attention import rotated, running_rotation
from primal_attention.patching.patch import patch
from primal_attention.patching.sites import find_sites, patched_layers


class Call(NamedTuple):
    """One call of an attention: what went in, and what came out."""

    x: Tensor  # [B, N, D]
    masks: dict[str, Any]  # token_mask; context and context_mask where it attends elsewhere
    rotation: Any  # by rotary positions, where the host has them
    y: Tensor  # [B, N, D]

    def real(self, z: Tensor) -> Tensor:
        """The real tokens of z [B, N, ...], one after the other."""
        mask = self.masks.get("token_mask")
        return z.flatten(0, 1) if mask is None else z[mask]


def reference_of(
    teacher: nn.Module, layers: Mapping[str, PatchedAttention], device: torch.device
) -> nn.Module:
    """A copy of the teacher that shows as mechanisms the attentions that layers have replaced.

    They are patched with softmax attention, which computes what they did. The copy shares its
    tensors with the teacher unless they have to go to another device.
    """
    tensors = [*teacher.parameters(), *teacher.buffers()]
    there = all(tensor.device == device for tensor in tensors)
    copy = deepcopy(teacher, {id(t): t for t in tensors} if there else None).eval().to(device)
    found = {site.name: site for site in find_sites(copy)}
    missing = [name for name in layers if name not in found]
    if missing:
        raise ValueError(
            f"teacher has no attention at {', '.join(missing)}, which is patched in model; pass "
            "the model as it was before patch (a deep copy of it)"
        )
    for name, layer in layers.items():
        if not isinstance(found[name].module, PatchedAttention):
            patch(copy, "softmax", name, causal=layer.causal)
    return copy


@contextmanager
def watch(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, list[Call]]]:
    """Collect the calls of patched layers, by name, while the block runs."""
    layers = patched_layers(model)
    calls: dict[str, list[Call]] = {name: [] for name in names}
    hooks = [
        layers[name].mechanism.register_forward_hook(partial(_note, calls[name]), with_kwargs=True)
        for name in calls
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def run(model: nn.Module, batch: Mapping[str, Any]) -> Any:
    """The outputs of a model for one batch of its inputs, by name."""
    known = inspect.signature(model.forward).parameters
    device = next(model.parameters()).device
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    return model(**inputs, **({"use_cache": False} if "use_cache" in known else {}))


@contextmanager
def as_called(layer: PatchedAttention, call: Call) -> Iterator[Any]:
    """The mechanism of a layer, ready to be called as the call was."""
    with rotated(call.rotation):
        yield layer.mechanism


def again(layer: PatchedAttention, call: Call) -> Tensor:
    """What a layer makes of the inputs of a call, [B, N, D]."""
    with as_called(layer, call) as mechanism:
        y: Tensor = mechanism(call.x, **call.masks)
    return y


def _note(
    calls: list[Call],
    mechanism: nn.Module,
    args: Any,
    kwargs: Any,
    y: Tensor,
) -> None:
    x, *context = args
    masks = dict(kwargs) | ({"context": context[0]} if context else {})
    calls.append(Call(x, masks, running_rotation(), y))
