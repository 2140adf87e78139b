"""How far a run is, and what came of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from primal_attention.training.recipe import Recipe

Entry = dict[str, float]
"""Numbers of a round: epoch, step, losses and the metric."""


@dataclass
class Progress:
    """Progress of a run; a checkpoint holds it beside tensors."""

    rounds: list[Entry] = field(default_factory=list)
    best: int = -1  # index of the best round
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Steps that were made."""
        return int(self.rounds[-1]["step"]) if self.rounds else 0

    def check(self) -> None:
        """Raise unless the numbers are numbers, and the best round, if any, is one of them."""
        if self.rounds or self.best != -1:
            _check_rounds(self.rounds, self.best, "valid_loss")
        if not isinstance(self.seconds, int | float):
            raise ValueError(f"seconds is {self.seconds!r}")


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    recipe: Recipe
    metric: str
    value: float  # of the test cases, with the weights of the best round
    valid: float  # of the cases that chose this round
    rounds: list[Entry]
    best: int
    steps: int
    seconds: float
    device: str
    weights: dict[str, Tensor]  # of the best round, on the CPU

    def check(self) -> None:
        """Raise unless the numbers are numbers, and the best round is one of the rounds."""
        losses = "train_loss", "objective", "valid_loss"
        _check_rounds(self.rounds, self.best, *losses, f"valid_{self.metric}")
        for name in ("value", "valid", "seconds"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}")


def _check_rounds(rounds: Sequence[Entry], best: int, *names: str) -> None:
    """Raise unless each round has these numbers and its place, and nothing but numbers."""
    if not 0 <= best < len(rounds):
        raise ValueError(f"round {best} of {len(rounds)} cannot be the best")
    for index, entry in enumerate(rounds):
        for name in dict.fromkeys(("epoch", "step", *names, *entry)):
            if not isinstance(entry[name], int | float):
                raise ValueError(f"{name} of round {index} is {entry[name]!r}")


class OutOfTimeError(Exception):
    """A run had to stop before its end; it goes on from what is saved."""
