"""How far a run is, and what came of it."""

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
        """Raise unless the numbers are numbers, and the best round is one of the rounds."""
        if not -1 <= self.best < len(self.rounds):
            raise ValueError(f"round {self.best} of {len(self.rounds)} cannot be the best")
        for number, entry in enumerate(self.rounds):
            for name in {"epoch", "step", "valid_loss", *entry}:
                if not isinstance(entry[name], int | float):
                    raise ValueError(f"{name} of round {number} is {entry[name]!r}")
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


class OutOfTimeError(Exception):
    """A run had to stop before its end; it goes on from what is saved."""
