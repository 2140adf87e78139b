"""Which cases are seen when, and with which random numbers: functions of seed and step alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The steps of a run: epochs of shuffled cases, rounds of epochs that end in an evaluation."""

    seed: int
    num_cases: int
    batch_size: int
    epochs: int
    eval_every: int

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch; the last may be smaller."""
        return -(-self.num_cases // self.batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        return self.epochs * self.steps_per_epoch

    @property
    def num_rounds(self) -> int:
        """Evaluations of the whole run; the last round may be shorter."""
        return -(-self.epochs // self.eval_every)

    def epochs_of(self, round_index: int) -> range:
        """The epochs of a round."""
        first = round_index * self.eval_every
        return range(first, min(first + self.eval_every, self.epochs))

    def batches(self, epoch: int, device: torch.device) -> Iterator[Tensor]:
        """The indices of each batch of an epoch, on the device of the cases."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_cases)
        indices = torch.from_numpy(order).to(device)
        for step in range(self.steps_per_epoch):
            yield indices[step * self.batch_size : (step + 1) * self.batch_size]

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
