"""Carry over to patched layers what the attentions that they replace had learnt."""

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import nn

from primal_attention.attention.base.validation import check_choice
from primal_attention.patching.distill.batches import Batches, split
from primal_attention.patching.distill.initialising import initialise
from primal_attention.patching.distill.matching import OUTPUTS, Pair, reference_of
from primal_attention.patching.distill.training import (
    Progress,
    StageTargets,
    only_layers_learn,
    train,
)
from primal_attention.patching.sites import patched_layers


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
    """

    layers: dict[str, Errors]
    outputs: Errors
    steps: int
    num_valid: int

    def __str__(self) -> str:
        named = {**self.layers, "model outputs": self.outputs}
        width = max(map(len, (*named, "relative error")))
        lines = ["relative error".ljust(width) + "".join(f"{name:>13}" for name in Errors._fields)]
        for name, errors in named.items():
            lines.append(name.ljust(width) + "".join(f"{error:13.4f}" for error in errors))
        return "\n".join([*lines, f"held-out tokens: {self.num_valid:,}; steps: {self.steps}"])


def distill(  # noqa: PLR0913 - each option is a line of the docstring
    model: nn.Module,
    teacher: nn.Module,
    batches: Batches,
    *,
    steps: int = 300,
    lr: float = 0.02,
    valid: Batches | None = None,
    match: str = "layers",
    calibration: int = 32,
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
        batches: Mappings from names to model inputs. They are gone through again where they are too
            few.
        steps: Training steps in all; 0 for the initialisation alone.
        lr: Highest learning rate, relative to the size of each parameter tensor.
        valid: Batches to measure with. Without it the first four of ``batches`` are set aside,
            which is not safe where a new pass over them comes in another order.
        match: ``"layers"``, or ``"layers+outputs"`` to match the outputs of the model (logits or
            hidden states) as well.
        calibration: How many batches the initialisation from data sees; 0 for none.
        seed: Of all random numbers.
        progress: Called with an :class:`Event` after each step.

    Returns:
        The errors before and after each stage, on held-out batches.
    """
    layers = patched_layers(model)
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no patched layer; patch it first")
    _check(model, teacher, steps=steps, lr=lr, calibration=calibration)
    check_choice("match", match, ("layers", "layers+outputs"))
    held_out, stream = split(batches, valid)
    progress = progress or (lambda event: None)
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        pair = Pair(model, reference_of(teacher, layers, device), layers)
        with only_layers_learn(model, layers):
            measured = [pair.measure(held_out)]
            if calibration:
                initialise(pair, islice(stream, calibration), calibration, progress)
            measured.append(pair.measure(held_out))
            outputs = match == "layers+outputs"
            second = steps // 2 if outputs or len(layers) > 1 else 0
            stages = {
                StageTargets("layers, teacher's inputs", False, False): steps - second,
                StageTargets("layers, own inputs", True, outputs): second,
            }
            taken = sum(
                train(pair, stage, stream, number, held_out, lr, progress)
                for stage, number in stages.items()
                if number
            )
            measured.append(pair.measure(held_out))
    errors = {name: Errors(*(each[name].error for each in measured)) for name in measured[0]}
    outputs_error = errors.pop(OUTPUTS)
    num_valid = next(iter(measured[0].values())).num_tokens
    return DistillReport(errors, outputs_error, taken, num_valid)


def _check(model: nn.Module, teacher: nn.Module, **numbers: float) -> None:
    if teacher is model:
        raise ValueError("teacher is the model itself; pass a deep copy taken before patch")
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")
    if numbers["lr"] == 0:
        raise ValueError("lr must be positive, got 0; for no training, steps=0")
