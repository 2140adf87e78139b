"""What a benchmark is to the training loop: cases, a loss, a metric.

Letters: B cases of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Batch(NamedTuple):
    """Some cases: what the model is called with, by argument name, and what it should answer."""

    inputs: dict[str, Tensor]
    target: Tensor  # [B, ...]


@dataclass(frozen=True)
class Cases:
    """A split of a benchmark, held in memory on one device; the first axis of all is the case."""

    inputs: Mapping[str, Tensor]
    target: Tensor

    def __post_init__(self) -> None:
        """Every tensor has one row a case."""
        for name, tensor in self.inputs.items():
            if len(tensor) != len(self.target):
                raise ValueError(
                    f"{name} has {len(tensor)} cases, the target has {len(self.target)}"
                )

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, indices: Tensor) -> Batch:
        """The cases with those indices, a tensor on the device of the cases."""
        inputs = {name: tensor[indices] for name, tensor in self.inputs.items()}
        return Batch(inputs, self.target[indices])

    def drawn(self, indices: Tensor) -> Batch:
        """Those cases as they are trained on: as they are, unless a split augments them."""
        return self[indices]

    @property
    def resident(self) -> bool:
        """Whether a batch is there without any work of the CPU."""
        return True

    def joined(self, other: Cases) -> Cases:
        """These cases and, after them, the others."""
        inputs = {name: torch.cat([each, other.inputs[name]]) for name, each in self.inputs.items()}
        return Cases(inputs, torch.cat([self.target, other.target]))

    def to(self, device: torch.device) -> Cases:
        """The same cases on another device."""
        inputs = {name: tensor.to(device) for name, tensor in self.inputs.items()}
        return replace(self, inputs=inputs, target=self.target.to(device))


def _one_each(target: Tensor) -> Tensor:
    return target.new_ones(len(target), dtype=torch.float64)


@dataclass(frozen=True)
class Goal:
    """What is minimised and what is reported: both the mean of one number a case.

    A case may count for less than others, or for more: its loss and score are then already times
    its weight, and a mean is their sum over that of the weights.
    """

    losses: Callable[[Tensor, Tensor], Tensor]  # outputs, target -> [B]
    scores: Callable[[Tensor, Tensor], Tensor]  # outputs, target -> [B]
    metric: str
    value: Callable[[float], float]  # the metric, of the mean score
    higher_is_better: bool
    weights: Callable[[Tensor], Tensor] = _one_each  # target -> [B]: how much each case counts


def _cross_entropies(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target, reduction="none")


def _correct(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(-1) == target).to(outputs.dtype)


def _squared_errors(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.squeeze(-1) - target).square()


CLASSIFICATION = Goal(
    _cross_entropies, _correct, "accuracy", lambda mean: 100 * mean, higher_is_better=True
)
REGRESSION = Goal(
    _squared_errors, _squared_errors, "mse", lambda mean: mean, higher_is_better=False
)


@dataclass(frozen=True)
class Sizes:
    """What a model has to know of the cases before it is built."""

    num_tokens: int  # the longest sequence
    num_outputs: int  # classes, or numbers to predict
    num_channels: int | None = None  # of a token, where tokens are vectors
    vocab_size: int | None = None  # where tokens are symbols
    mean: list[float] | None = None  # of each channel, where cases are pictures
    std: list[float] | None = None


class Encoding(Protocol):
    """How cases as they come become the inputs of a model, fitted on what is trained on."""

    def encode(self, cases: Any, /) -> dict[str, Tensor]:
        """The arguments of a model, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, for a checkpoint."""


@dataclass(frozen=True)
class Task:
    """A benchmark: where to learn, where to choose, where to report, and what counts.

    Selection looks at ``valid`` alone. A protocol that selects on the test cases has the same
    cases in both places.
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
        """The same task with its cases on another device."""
        train, valid, test = (each.to(device) for each in (self.train, self.valid, self.test))
        return replace(self, train=train, valid=valid, test=test)
