"""How far a run is, who is told of it, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from primal_attention.training.order import Plan
from primal_attention.training.recipe import Recipe

Entry = dict[str, float]
"""What is known at the end of a round: epoch, step, losses and the metric."""


@dataclass
class Progress:
    """How far a run is; what a checkpoint holds beside tensors."""

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
    """What came of a run."""

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


class Saving(NamedTuple):
    """When a run is saved: every so many seconds, and when its time is over."""

    every: float
    until: float


class OutOfTimeError(Exception):
    """A run had to stop before its end; it goes on from what is saved."""


class Watcher:
    """Is told how a run goes, in the first process alone; this one says nothing."""

    def start(self, recipe: Recipe, plan: Plan, progress: Progress) -> None:
        """The run begins, or goes on after the rounds of the progress, which grows as it runs."""

    def step(self, step: int) -> None:
        """A step was made."""

    def round(self, entry: Entry) -> None:
        """A round is over, and is the last one of the progress."""

    def stop(self) -> None:
        """The run is over, or was interrupted."""

    def of_refit(self) -> Watcher:
        """Who is told of the second training, on all cases; nobody unless told."""
        return Watcher()


class Watchers(Watcher):
    """Several watchers, told one after the other."""

    def __init__(self, watchers: Sequence[Watcher]):
        self.watchers = watchers

    def start(self, recipe: Recipe, plan: Plan, progress: Progress) -> None:
        """Tell each."""
        for watcher in self.watchers:
            watcher.start(recipe, plan, progress)

    def step(self, step: int) -> None:
        """Tell each."""
        for watcher in self.watchers:
            watcher.step(step)

    def round(self, entry: Entry) -> None:
        """Tell each."""
        for watcher in self.watchers:
            watcher.round(entry)

    def stop(self) -> None:
        """Tell each, even where one fails."""
        with ExitStack() as told:
            for watcher in reversed(self.watchers):
                told.callback(watcher.stop)

    def of_refit(self) -> Watcher:
        """Those of each."""
        return Watchers([watcher.of_refit() for watcher in self.watchers])
