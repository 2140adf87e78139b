"""Plan the cases of each step and its random numbers: functions of seed and step alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.training.recipe import Recipe


@dataclass(frozen=True)
class BatchPlan:
    """The steps of a run, and its rounds, each of which ends in an evaluation.

    A run of epochs has a shorter last batch in each. A run of steps has full batches alone: epochs
    follow each other without a seam, and a batch may have cases of two.
    """

    seed: int
    num_cases: int
    batch_size: int
    epochs: int
    eval_every: int  # epochs, or steps where steps are given
    steps: int | None = None  # in place of epochs

    @classmethod
    def of(cls, recipe: Recipe, num_cases: int) -> BatchPlan:
        """Plan a run of a recipe on so many cases."""
        optim, run = recipe.optim, recipe.run
        return cls(run.seed, num_cases, optim.batch_size, optim.epochs, run.eval_every, optim.steps)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last may be smaller."""
        return -(-self.num_cases // self.batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        return self.epochs * self.steps_per_epoch if self.steps is None else self.steps

    @property
    def num_rounds(self) -> int:
        """Evaluations of the whole run; the last round may be shorter."""
        return -(-(self.steps or self.epochs) // self.eval_every)

    def epochs_of(self, round_index: int) -> range:
        """Return the epochs of a round, in a run of epochs."""
        first = round_index * self.eval_every
        return range(first, min(first + self.eval_every, self.epochs))

    def steps_of(self, round_index: int) -> range:
        """Return the steps of a round."""
        length = self.eval_every * (self.steps_per_epoch if self.steps is None else 1)
        first = round_index * length
        return range(first, min(first + length, self.total_steps))

    def epochs_after(self, steps: int) -> float:
        """Return how often the cases were seen after so many steps."""
        if self.steps is None:
            return steps // self.steps_per_epoch
        return round(steps * self.batch_size / self.num_cases, 3)

    def batches_of(self, round_index: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of each batch of a round, on the device of the cases."""
        if self.steps is None:
            for epoch in self.epochs_of(round_index):
                yield from self.batches(epoch, device)
            return
        steps = self.steps_of(round_index)
        first, last = steps.start * self.batch_size, steps.stop * self.batch_size
        epochs = range(first // self.num_cases, -(-last // self.num_cases))
        order = np.concatenate([self._order(epoch) for epoch in epochs])
        begin = first - epochs.start * self.num_cases
        yield from self._split(order[begin : begin + last - first], device)

    def batches(self, epoch: int, device: torch.device) -> Iterator[Tensor]:
        """Yield the indices of each batch of an epoch."""
        yield from self._split(self._order(epoch), device)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_cases)

    def _split(self, order: NDArray[np.int64], device: torch.device) -> Iterator[Tensor]:
        indices = torch.from_numpy(order)
        if device.type == "cuda":  # copied asynchronously
            indices = indices.pin_memory()
        indices = indices.to(device, non_blocking=True)
        for first in range(0, len(order), self.batch_size):
            yield indices[first : first + self.batch_size]

    def reseed(self, round_index: int, process: int, device: torch.device) -> None:
        """Begin a round with random numbers of its own, in each process."""
        sequence = np.random.SeedSequence([self.seed, round_index, process])
        set_seed(int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1)), device)


def set_seed(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of that device, and leave those of others alone."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
