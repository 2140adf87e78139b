"""Run a student and its teacher, and compare patched layers with what they replaced.

Letters: B batch, N tokens, D model dim, T real tokens.
"""

import inspect
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.patching.distill.batches import Batch
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.hosts.transformers_attention import rotated, running_rotation
from primal_attention.patching.patch import patch
from primal_attention.patching.sites import find_sites, patched_layers

OUTPUTS = ""
"""The name of the outputs of the whole model among the names of layers."""

Made = dict[str, list[Tensor]]
"""Outputs by the name of the layer, or of the model, one for each call."""


class Call(NamedTuple):
    """One call of an attention: its inputs and its output."""

    x: Tensor  # [B, N, D]
    masks: dict[str, Any]  # token_mask; context and context_mask where it attends elsewhere
    rotation: Any  # by rotary positions, where the host has them
    y: Tensor  # [B, N, D]

    def real(self, z: Tensor) -> Tensor:
        """Select the real tokens of z [B, N, ...], one after the other."""
        mask = self.masks.get("token_mask")
        return z.flatten(0, 1) if mask is None else z[mask]

    def repeated_by(self, layer: PatchedAttention) -> Tensor:
        """Return the output of the mechanism of a layer for this call."""
        with rotated(self.rotation):
            y: Tensor = layer.mechanism(self.x, **self.masks)
        return y


class Shown(NamedTuple):
    """The calls of the layers and the outputs of a model for one batch."""

    calls: dict[str, list[Call]]
    outputs: Tensor

    def paired(self, made: Made) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Pair outputs of a student with those shown, at the real tokens, [T, ...] each."""
        mask = list(self.calls.values())[-1][-1].masks.get("token_mask")
        fits = mask is not None and self.outputs.shape[:2] == mask.shape
        pairs = {}
        for name, ys in made.items():
            targets = [(call.y, call.masks.get("token_mask")) for call in self.calls.get(name, ())]
            if name == OUTPUTS:
                targets = [(self.outputs, mask if fits else None)]
            pairs[name] = [
                (y, target) if mask is None else (y[mask], target[mask])
                for y, (target, mask) in zip(ys, targets, strict=True)
            ]
        return pairs


class Spread(NamedTuple):
    """The error of outputs, and their variance, over all real tokens."""

    error: float  # squared error over variance
    variance: float  # of a token, summed over the channels
    num_tokens: int


@dataclass(frozen=True)
class Pair:
    """A student and the teacher whose attentions are shown as mechanisms."""

    student: nn.Module
    teacher: nn.Module
    layers: Mapping[str, PatchedAttention]  # of the student

    def show(self, model: nn.Module, batch: Batch) -> Shown:
        """Run one of the two on a batch, and collect the calls of its patched layers."""
        layers = patched_layers(model)
        calls: dict[str, list[Call]] = {name: [] for name in self.layers}
        hooks = [
            layers[name].mechanism.register_forward_hook(partial(_note, own), with_kwargs=True)
            for name, own in calls.items()
        ]
        known = inspect.signature(model.forward).parameters
        device = next(model.parameters()).device
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        try:
            outputs = model(**inputs, **({"use_cache": False} if "use_cache" in known else {}))
        finally:
            for hook in hooks:
                hook.remove()
        return Shown(calls, _main_output(outputs))

    @torch.no_grad()
    def teach(self, batch: Batch) -> Shown:
        """Run the teacher."""
        return self.show(self.teacher, batch)

    def on_teachers_inputs(self, taught: Shown) -> Made:
        """Return the outputs of each layer for the inputs that the teacher had there."""
        return {
            name: [call.repeated_by(layer) for call in taught.calls[name]]
            for name, layer in self.layers.items()
        }

    def on_own_inputs(self, batch: Batch) -> Made:
        """Return the outputs of each layer and of the whole student for a batch."""
        shown = self.show(self.student, batch)
        ys = {name: [call.y for call in calls] for name, calls in shown.calls.items()}
        return ys | {OUTPUTS: [shown.outputs]}

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> dict[str, Spread]:
        """Measure layers on the teacher's inputs, and the outputs of the model on its own."""
        sums = {name: _Sums() for name in (*self.layers, OUTPUTS)}
        for batch in batches:
            taught = self.teach(batch)
            made = self.on_teachers_inputs(taught)
            made[OUTPUTS] = self.on_own_inputs(batch)[OUTPUTS]
            for name, pairs in taught.paired(made).items():
                for pair in pairs:
                    sums[name].add(*pair)
        return {name: each.spread() for name, each in sums.items()}


def reference_of(
    teacher: nn.Module, layers: Mapping[str, PatchedAttention], device: torch.device
) -> nn.Module:
    """Copy the teacher, with mechanisms for the attentions that layers have replaced.

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


class _Sums:
    def __init__(self) -> None:
        self.error, self.squares, self.num_tokens = 0.0, 0.0, 0
        self.total: Tensor | float = 0.0

    def add(self, made: Tensor, wanted: Tensor) -> None:
        made, wanted = (z.double().flatten(0, -2) for z in (made, wanted))
        self.error += float((made - wanted).square().sum())
        self.squares += float(wanted.square().sum())
        self.total = self.total + wanted.sum(0)
        self.num_tokens += len(wanted)

    def spread(self) -> Spread:
        n = max(self.num_tokens, 1)
        mean_square = float(torch.as_tensor(self.total / n).square().sum())
        variance = max(self.squares / n - mean_square, 1e-30)
        return Spread(self.error / n / variance, variance, self.num_tokens)


def _note(calls: list[Call], mechanism: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
    x, *context = args
    masks = dict(kwargs) | ({"context": context[0]} if context else {})
    calls.append(Call(x, masks, running_rotation(), y))


def _main_output(outputs: Any) -> Tensor:
    """Select the logits or hidden states among the outputs of a model."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        for name in ("logits", "last_hidden_state"):
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]  # type: ignore[no-any-return]
        outputs = tuple(outputs.values())
    return next(each for each in outputs if isinstance(each, Tensor) and each.is_floating_point())
