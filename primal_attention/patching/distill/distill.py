"""Carry over to patched layers what the attentions that they replace had learnt."""

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from primal_attention.attention.base.validation import check_choice
from primal_attention.attention.primal import KSVDLayer
from primal_attention.patching.distill.batches import Batch, Batches, BatchStream
from primal_attention.patching.distill.initialising import fit_of
from primal_attention.patching.distill.matching import OUTPUTS, Pair, Spread, reference_of
from primal_attention.patching.distill.training import (
    Event,
    Progress,
    StageTargets,
    Trainer,
    only_layers_learn,
)
from primal_attention.patching.sites import patched_layers

_NUM_VALID = 4


class Errors(NamedTuple):
    """Squared error relative to the variance of the teacher's output: 0 is equal, 1 its mean."""

    patched: float  # before anything was done
    initialised: float  # after the initialisation from data
    transferred: float  # after training


@dataclass(frozen=True)
class DistillReport:
    """Errors before and after each stage of ``distill``; print it.

    Attributes:
        layers: Errors of each replaced layer on the teacher's inputs, by name.
        outputs: Errors of the outputs of the whole model, on its own inputs throughout.
        steps: Training steps taken.
        num_valid: Real tokens in the held-out batches.
        initialisation_seconds: Time of the initialisation from data.
        training_seconds: Time of the training, its checks on held-out batches included.
    """

    layers: dict[str, Errors]
    outputs: Errors
    steps: int
    num_valid: int
    initialisation_seconds: float
    training_seconds: float

    def __str__(self) -> str:
        named = {**self.layers, "model outputs": self.outputs}
        width = max(map(len, (*named, "relative error")))
        lines = ["relative error".ljust(width) + "".join(f"{name:>13}" for name in Errors._fields)]
        for name, errors in named.items():
            lines.append(name.ljust(width) + "".join(f"{error:13.4f}" for error in errors))
        return "\n".join(
            [
                *lines,
                f"held-out tokens: {self.num_valid:,}; initialisation "
                f"{self.initialisation_seconds:.0f} s, {self.steps} steps "
                f"{self.training_seconds:.0f} s",
            ]
        )


def distill(  # noqa: PLR0913 - each option is a line of the docstring
    model: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    *,
    steps: int = 300,
    lr: float = 0.02,
    valid: Batches | None = None,
    eta: float = 0.0,
    match: str = "layers",
    calibration: int = 32,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> DistillReport:
    """Fit the patched layers of a model to the attentions of the model before it was patched.

    First in closed form, from sums over calibration batches; then by a short training in which each
    layer is to give the teacher's output for the teacher's input, then for the inputs that it gets
    in the patched model. Only real tokens count. Nothing but the patched layers changes.

    Args:
        model: The patched model, changed in place.
        teacher: The model as it was before, for one a deep copy taken then. It does not change.
        batches: Mappings from names to model inputs, or a function that gives them anew. They are
            gone through again where they are too few.
        steps: Training steps in all; 0 for the initialisation alone.
        lr: Highest learning rate, relative to the size of each parameter tensor.
        valid: Batches to measure with. Without it the first four of ``batches`` are set aside,
            which is not safe where a new pass over them comes in another order.
        eta: Weight of the KSVD objective.
        match: ``"layers"``, or ``"layers+outputs"`` to match the outputs of the model (logits or
            hidden states) as well.
        calibration: How many batches the initialisation from data sees; 0 for none.
        device: Where to compute, and to leave the model; by default where it is.
        seed: Of all random numbers.
        progress: Called with an :class:`Event` after each step.

    Returns:
        The errors before and after each stage, on held-out batches.
    """
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no patched layer; patch it first")
    _check(model, teacher, steps=steps, lr=lr, eta=eta, calibration=calibration)
    check_choice("match", match, ("layers", "layers+outputs"))
    stream = BatchStream("batches", batches)
    held_out = stream.set_aside(_NUM_VALID) if valid is None else BatchStream("valid", valid).once()
    model.to(device)
    own_device = next(model.parameters()).device
    devices = [own_device] if own_device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        pair = Pair(model, reference_of(teacher, layers, own_device), layers)
        transfer = _Transfer(pair, stream, held_out, progress or (lambda event: None))
        with only_layers_learn(model, layers, training=eta > 0):
            transfer.initialise(calibration)
            transfer.train(steps, lr, eta, outputs=match == "layers+outputs")
    return transfer.report()


class _Transfer:
    """The stages of one transfer, with the errors measured between them."""

    def __init__(self, pair: Pair, stream: BatchStream, valid: list[Batch], progress: Progress):
        self.pair, self.stream, self.valid, self.progress = pair, stream, valid, progress
        self.measured: list[dict[str, Spread]] = []
        self.steps = 0
        self.seconds: list[float] = []

    def initialise(self, num_batches: int) -> None:
        """Solve for the parameters of all layers in one pass over the calibration batches."""
        self._measure()
        began, pair = time.perf_counter(), self.pair
        replaced = patched_layers(pair.teacher)
        fits = {
            name: fit_of(layer, replaced[name].mechanism) for name, layer in pair.layers.items()
        }
        for done, batch in enumerate(self.stream.take(num_batches), 1):
            for name, calls in pair.teach(batch).calls.items():
                for call in calls:
                    fits[name].add(call)
            self.progress(Event("initialisation from data", done, num_batches, None))
        if num_batches:
            for fit in fits.values():
                fit.finish()
        self.seconds.append(time.perf_counter() - began)
        self._measure()

    def train(self, steps: int, lr: float, eta: float, *, outputs: bool) -> None:
        """Train on the teacher's inputs; half of the steps on the student's, where these differ."""
        began = time.perf_counter()
        trainer = Trainer(self.pair, self.valid, lr, self.progress)
        second = steps // 2 if outputs or len(self.pair.layers) > 1 else 0
        goals = {
            StageTargets("layers, teacher's inputs", False, False, eta): steps - second,
            StageTargets("layers, own inputs", True, outputs, eta): second,
        }
        for goal, number in goals.items():
            if number:
                start = self.pair.measure(self.valid) if self.steps else self.measured[-1]
                self.steps += trainer.run(goal, self.stream, number, start)
        self.seconds.append(time.perf_counter() - began)
        self._measure()

    def report(self) -> DistillReport:
        """Summarise the measurements."""
        errors = {
            name: Errors(*(stage[name].error for stage in self.measured))
            for name in self.measured[0]
        }
        outputs = errors.pop(OUTPUTS)
        num_valid = next(iter(self.measured[0].values())).num_tokens
        return DistillReport(errors, outputs, self.steps, num_valid, *self.seconds)

    def _measure(self) -> None:
        self.measured.append(self.pair.measure(self.valid))


def _check(model: nn.Module, teacher: nn.Module, **numbers: float) -> None:
    if teacher is model:
        raise ValueError("teacher is the model itself; pass a deep copy taken before patch")
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if numbers["lr"] == 0:
        raise ValueError("lr must be positive, got 0; for no training, steps=0")
    if numbers["eta"] and not any(isinstance(each, KSVDLayer) for each in model.modules()):
        raise ValueError(f"eta={numbers['eta']}, but no patched layer has a KSVD objective")
