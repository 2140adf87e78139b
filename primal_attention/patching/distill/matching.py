"""How near the patched layers of a student are to the attentions that they replace.

Letters: B batch, N tokens, D model dim, T real tokens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.patching.distill.batches import Batch
from primal_attention.patching.distill.collecting import Call, again, run, watch
from primal_attention.patching.hosts.host import PatchedAttention

OUTPUTS = ""
"""The name of the outputs of the whole model among the names of layers."""


class Shown(NamedTuple):
    """What one batch shows of a model."""

    calls: dict[str, list[Call]]
    outputs: Tensor


class Spread(NamedTuple):
    """How far outputs are off, and how much they vary, over all real tokens."""

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
        """Run one of the two."""
        with watch(model, self.layers) as calls:
            outputs = _main_output(run(model, batch))
        return Shown(calls, outputs)

    @torch.no_grad()
    def teach(self, batch: Batch) -> Shown:
        """What the teacher does with a batch."""
        return self.show(self.teacher, batch)

    def on_teachers_inputs(self, taught: Shown) -> dict[str, list[Tensor]]:
        """What each layer makes of the inputs that the teacher had there."""
        return {
            name: [again(layer, call) for call in taught.calls[name]]
            for name, layer in self.layers.items()
        }

    def on_own_inputs(self, batch: Batch) -> dict[str, list[Tensor]]:
        """What each layer and the whole student make of a batch."""
        shown = self.show(self.student, batch)
        ys = {name: [call.y for call in calls] for name, calls in shown.calls.items()}
        return ys | {OUTPUTS: [shown.outputs]}

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> dict[str, Spread]:
        """Layers on the teacher's inputs, and the outputs of the model on its own."""
        sums: dict[str, Any] = {name: _Sums() for name in (*self.layers, OUTPUTS)}
        for batch in batches:
            taught = self.teach(batch)
            made = self.on_teachers_inputs(taught)
            made[OUTPUTS] = self.on_own_inputs(batch)[OUTPUTS]
            for name, ys in made.items():
                for y, target in zip(ys, targets_of(taught, name, ys), strict=True):
                    sums[name].add(*target.pair(y))
        return {name: each.spread() for name, each in sums.items()}


class Target(NamedTuple):
    """What an output should be, at the real tokens."""

    y: Tensor  # [B, N, ...]
    mask: Tensor | None  # [B, N]

    def pair(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs and targets of the real tokens, [T, ...] each."""
        if self.mask is None:
            return y, self.y
        return y[self.mask], self.y[self.mask]


def targets_of(taught: Shown, name: str, like: list[Tensor]) -> list[Target]:
    """The targets of a layer, or of the outputs."""
    if name != OUTPUTS:
        return [Target(call.y, call.masks.get("token_mask")) for call in taught.calls[name]]
    last = list(taught.calls.values())[-1][-1]
    mask = last.masks.get("token_mask")
    fits = mask is not None and taught.outputs.shape[:2] == mask.shape
    return [Target(taught.outputs, mask if fits else None)]


def relative_error(y: Tensor, target: Target, variance: float) -> Tensor:
    """Mean squared error over the variance of a token."""
    made, wanted = target.pair(y)
    num_tokens = made.numel() // made.shape[-1]
    return (made - wanted).square().sum() / (max(num_tokens, 1) * max(variance, 1e-30))


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


def _main_output(outputs: Any) -> Tensor:
    """The logits or hidden states among what a model returns."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        for name in ("logits", "last_hidden_state"):
            if isinstance(outputs.get(name), Tensor):
                return outputs[name]  # type: ignore[no-any-return]
        outputs = tuple(outputs.values())
    return next(each for each in outputs if isinstance(each, Tensor) and each.is_floating_point())
