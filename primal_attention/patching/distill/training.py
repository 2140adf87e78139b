"""Short training of the patched layers towards the attentions that they replace."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from statistics import mean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.patching.distill.batches import Batch
from primal_attention.patching.distill.matching import OUTPUTS, Pair, Spread
from primal_attention.patching.hosts.host import PatchedAttention

CHECKS = 6
"""Number of measurements of a stage on held-out batches."""
PATIENCE = 3
"""A stage stops after so many measurements without a better one."""
_SMALLEST_STEP, _RISE = 1e-3, 0.2


class Event(NamedTuple):
    """The progress of a transfer."""

    stage: str
    done: int  # steps of the stage
    total: int
    error: float | None  # held-out, where it was just measured


Progress = Callable[[Event], None]


class StageTargets(NamedTuple):
    """The targets of one stage of training."""

    name: str
    own_inputs: bool  # of the student; else each layer gets the teacher's
    outputs: bool  # the outputs of the model too

    def loss(self, pair: Pair, batch: Batch, start: Mapping[str, Spread]) -> Tensor:
        """Return the mean relative error of the layers, plus that of the outputs."""
        taught = pair.teach(batch)
        made = pair.on_own_inputs(batch) if self.own_inputs else pair.on_teachers_inputs(taught)
        errors = {
            name: _mean(_relative_error(*each, start[name].variance) for each in pairs)
            for name, pairs in taught.paired(made).items()
        }
        loss = _mean(errors[name] for name in pair.layers)
        return loss + errors[OUTPUTS] if self.outputs else loss

    def error(self, measured: Mapping[str, Spread]) -> float:
        """Return the error on held-out batches that training minimises."""
        if self.own_inputs:
            return measured[OUTPUTS].error
        return mean(spread.error for name, spread in measured.items() if name != OUTPUTS)


def train(
    pair: Pair,
    stage: StageTargets,
    batches: Iterable[Batch],
    steps: int,
    valid: list[Batch],
    lr: float,
    progress: Progress,
) -> int:
    """Take so many steps, fewer where they do not help; return how many were taken.

    The layers of the student end as they were best on held-out batches.
    """
    parameters = [p for layer in pair.layers.values() for p in layer.parameters()]
    # A step changes a tensor in proportion to its own size.
    groups = [{"params": [p], "lr": lr * _size(p)} for p in parameters]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_cycle, steps))
    start = pair.measure(valid)
    best, best_state, worse, done = stage.error(start), deepcopy(parameters), 0, 0
    every = max(1, steps // CHECKS)
    for done, batch in enumerate(islice(batches, steps), 1):
        loss = stage.loss(pair, batch, start)
        if not bool(loss.isfinite()):
            raise ValueError(
                f"the loss is {float(loss.detach())} at step {done}; try a smaller lr than {lr}, "
                "and look for inputs that are not finite"
            )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        error = None
        if done % every == 0 or done == steps:
            error = stage.error(pair.measure(valid))
            worse = 0 if error < best else worse + 1
            if error < best:
                best, best_state = error, deepcopy(parameters)
        progress(Event(stage.name, done, steps, error))
        if worse >= PATIENCE:
            break
    with torch.no_grad():
        for parameter, value in zip(parameters, best_state, strict=True):
            parameter.copy_(value)
    return done


@contextmanager
def only_layers_learn(model: nn.Module, layers: Mapping[str, PatchedAttention]) -> Iterator[None]:
    """Give gradients to the layers alone, in evaluation mode; restore all afterwards."""
    modes = {module: module.training for module in model.modules()}
    learns = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.eval().requires_grad_(False)
    for layer in layers.values():
        layer.requires_grad_(True)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, learn in learns.items():
            parameter.requires_grad_(learn)
            parameter.grad = None


def _cycle(steps: int, done: int) -> float:
    """One cycle: up in a line for a fifth of the steps, then down along a cosine."""
    place = (done + 1) / (steps + 1)
    if place < _RISE:
        return place / _RISE
    return 0.5 * (1 + math.cos(math.pi * (place - _RISE) / (1 - _RISE)))


def _size(parameter: Tensor) -> float:
    return max(float(parameter.detach().square().mean().sqrt()), _SMALLEST_STEP)


def _relative_error(made: Tensor, wanted: Tensor, variance: float) -> Tensor:
    """Mean squared error over the variance of a token."""
    num_tokens = made.numel() // made.shape[-1]
    return (made - wanted).square().sum() / (max(num_tokens, 1) * max(variance, 1e-30))


def _mean(values: Iterator[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean()
