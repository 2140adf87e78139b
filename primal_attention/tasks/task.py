"""Benchmarks as the training loop sees them: cases, a loss, a metric.

Letters: B cases of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Batch(NamedTuple):
    """Arguments of the model by name, and what it should answer, for some cases."""

    inputs: dict[str, Tensor]
    target: Tensor  # [B, ...]


@dataclass(frozen=True)
class Cases:
    """A split of a benchmark in memory on one device; the first axis of all is the case."""

    inputs: Mapping[str, Tensor]
    target: Tensor

    def __post_init__(self) -> None:
        """Check that every tensor has one row a case."""
        for name, tensor in self.inputs.items():
            if len(tensor) != len(self.target):
                raise ValueError(
                    f"{name} has {len(tensor)} cases, the target has {len(self.target)}"
                )

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, indices: Tensor) -> Batch:
        """Select cases by their indices, a tensor on the device of the cases."""
        inputs = {name: tensor[indices] for name, tensor in self.inputs.items()}
        return Batch(inputs, self.target[indices])

    def drawn(self, indices: Tensor) -> Batch:
        """Select cases to train on; a split may augment them."""
        return self[indices]

    @property
    def resident(self) -> bool:
        """True where a batch takes no work of the CPU."""
        return True

    def joined(self, other: Cases) -> Cases:
        """Append the other cases."""
        inputs = {name: torch.cat([each, other.inputs[name]]) for name, each in self.inputs.items()}
        return replace(self, inputs=inputs, target=torch.cat([self.target, other.target]))

    def to(self, device: torch.device) -> Cases:
        """Move the cases to another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, target=self.target.to(device))


def _ones(target: Tensor) -> Tensor:
    return target.new_ones(len(target), dtype=torch.float64)


@dataclass(frozen=True)
class Goal:
    """A loss to minimise and a metric to report, each the mean of one number a case.

    Cases may have weights: losses and scores are then already multiplied by them, and a mean is
    divided by their sum.
    """

    losses: Callable[[Tensor, Tensor], Tensor]  # outputs, target -> [B]
    scores: Callable[[Tensor, Tensor], Tensor]  # outputs, target -> [B]
    metric: str
    value: Callable[[float], float]  # the metric, of the mean score
    higher_is_better: bool
    weights: Callable[[Tensor], Tensor] = _ones  # target -> [B]


def _correct(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(-1) == target).to(outputs.dtype)


def _squared_errors(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - target).square()


CLASSIFICATION = Goal(
    partial(F.cross_entropy, reduction="none"),
    _correct,
    "accuracy",
    lambda mean: 100 * mean,
    higher_is_better=True,
)
REGRESSION = Goal(
    _squared_errors, _squared_errors, "mse", lambda mean: mean, higher_is_better=False
)


@dataclass(frozen=True)
class Sizes:
    """Properties of the cases that a model is built for."""

    num_tokens: int  # the longest sequence
    num_outputs: int  # classes, or numbers to predict
    num_channels: int | None = None  # of a token, where tokens are vectors
    vocab_size: int | None = None  # where tokens are symbols
    mean: list[float] | None = None  # of each channel, where cases are pictures
    std: list[float] | None = None


class Encoding(Protocol):
    """Turns raw cases into the inputs of a model; fitted on the training cases."""

    def encode(self, cases: Any, /) -> dict[str, Tensor]:
        """Return the arguments of a model, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for a checkpoint."""


@dataclass(frozen=True)
class Task:
    """A benchmark: cases to train on, to select by and to report, and what counts.

    Selection looks at ``valid`` alone; a protocol that selects on the test cases has them there.
    """

    name: str
    goal: Goal
    sizes: Sizes
    train: Cases
    valid: Cases
    test: Cases
    labels: tuple[str, ...] = ()  # names of the classes, by index
    encoding: Encoding | None = None  # what a trained model needs to answer new cases

    def to(self, device: torch.device) -> Task:
        """Move the cases to another device."""
        train, valid, test = (each.to(device) for each in (self.train, self.valid, self.test))
        return replace(self, train=train, valid=valid, test=test)
