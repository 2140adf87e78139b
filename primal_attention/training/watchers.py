"""Watchers of a run: log files, a bar in a terminal, lines elsewhere.

``metrics.csv`` and the files of TensorBoard are rewritten from the saved rounds when a run is
resumed, so that a killed run has neither gaps nor repeats.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.atomic_files import write_rows, writing_to
from primal_attention.extras import needing
from primal_attention.training.batch_plan import BatchPlan
from primal_attention.training.outcome import Entry, Progress
from primal_attention.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console

METRICS, TENSORBOARD = "metrics.csv", "tensorboard"


class Watcher:
    """Observer of a run, in the first process alone; this one does nothing."""

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Begin, or resume after the rounds of the progress, which grows as it runs."""

    def step(self, step: int) -> None:
        """Note a step."""

    def round(self, entry: Entry) -> None:
        """Note the end of a round, which is the last one of the progress."""

    def stop(self) -> None:
        """Finish, at the end of a run or at an interruption."""

    def of_refit(self) -> Watcher:
        """Return the watcher of the refit run; silent by default."""
        return Watcher()


class Watchers(Watcher):
    """Several watchers, told one after the other."""

    def __init__(self, watchers: Sequence[Watcher]):
        self.watchers = watchers

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
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
        """Return the watchers that each has for the refit run."""
        return Watchers([watcher.of_refit() for watcher in self.watchers])


class MetricsFile(Watcher):
    """One row a round in ``metrics.csv``: exactly the rounds that are done."""

    def __init__(self, directory: Path):
        self.path = directory / METRICS

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Write the rounds that are done; those of a killed run that were not saved go."""
        self.progress = progress
        self._write()

    def round(self, entry: Entry) -> None:
        """Add the round."""
        self._write()

    def _write(self) -> None:
        rounds = self.progress.rounds
        if not rounds:
            self.path.unlink(missing_ok=True)
            return
        write_rows(self.path, rounds)


class TensorBoard(Watcher):
    """A scalar for each number of a round, in the folder ``tensorboard``."""

    def __init__(self, directory: Path):
        self.directory = directory

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Begin a file with the rounds that are done, in place of those there were."""
        from lightning_fabric.loggers.tensorboard import TensorBoardLogger

        with writing_to(self.directory / TENSORBOARD):
            for old in (self.directory / TENSORBOARD).glob("events.out.tfevents.*"):
                old.unlink()
            with needing("logs for TensorBoard need it", "train"):
                self.logger: Any = TensorBoardLogger(
                    self.directory, name=TENSORBOARD, version="", flush_secs=10
                )
        for entry in progress.rounds:
            self.round(entry)

    def round(self, entry: Entry) -> None:
        """Add the round."""
        numbers = {name: value for name, value in entry.items() if name != "step"}
        with writing_to(self.directory / TENSORBOARD):
            self.logger.log_metrics(numbers, int(entry["step"]))

    def stop(self) -> None:
        """Write what is still in memory."""
        with writing_to(self.directory / TENSORBOARD):
            self.logger.finalize("")


def progress_bar(console: Console | None = None) -> Watcher:
    """Return a bar where the console is a terminal, else lines, as a log file can hold them."""
    with needing("a progress bar needs Rich", "cli"):
        from rich.console import Console
    console = console or Console(stderr=True)
    return _Bar(console) if console.is_terminal else Lines(console)


class Lines(Watcher):
    """A line at the end of a round, not more often than every so many seconds."""

    def __init__(self, console: Console, every: float = 5.0):
        self.console, self.every = console, every

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Say where it begins."""
        self.progress, self.plan = progress, plan
        self.done_before = progress.steps
        self.began = time.monotonic()
        self.said, self.unsaid = -self.every, ""
        going_on = f" after {_place(plan, progress)}" if progress.rounds else ""
        self._say(f"{recipe.task}, {recipe.model.name}, {plan.total_steps} steps{going_on}")

    def round(self, entry: Entry) -> None:
        """Say how it went, unless something was said just now."""
        self.unsaid = f"{_told(self.plan, self.progress)}, {self._time_left()} left"
        if time.monotonic() - self.said >= self.every:
            self._say(self.unsaid)
            self.said, self.unsaid = time.monotonic(), ""

    def stop(self) -> None:
        """Say the last round where it was not."""
        if self.unsaid:
            self._say(self.unsaid)

    def of_refit(self) -> Watcher:
        """Lines again."""
        return self

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def _time_left(self) -> str:
        done = self.progress.steps
        pace = (time.monotonic() - self.began) / (done - self.done_before)
        minutes, seconds = divmod(round(pace * (self.plan.total_steps - done)), 60)
        return f"{minutes}:{seconds:02d}"


class _Bar(Watcher):
    """A bar over all steps."""

    def __init__(self, console: Console):
        self.console = console

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Show the bar."""
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.progress, self.plan = progress, plan
        columns = BarColumn(), TextColumn("{task.description}")
        times = TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self.bar: Any = RichProgress(*columns, *times, console=self.console)
        text = _told(plan, progress)
        self.line = self.bar.add_task(text, total=plan.total_steps, completed=progress.steps)
        self.bar.start()

    def step(self, step: int) -> None:
        """Move on."""
        self.bar.update(self.line, completed=step + 1)

    def round(self, entry: Entry) -> None:
        """Say how it went."""
        self.bar.update(self.line, description=_told(self.plan, self.progress))

    def stop(self) -> None:
        """Leave the bar as it is."""
        self.bar.stop()

    def of_refit(self) -> Watcher:
        """Show a bar again."""
        return self


def _told(plan: BatchPlan, progress: Progress) -> str:
    """Describe the last and the best round."""
    if not progress.rounds:
        return f"{_place(plan, progress)}/{_end(plan)}"
    last, best = progress.rounds[-1], progress.rounds[progress.best]
    metric = next(reversed(last)).removeprefix("valid_")
    return (
        f"{_place(plan, progress)}/{_end(plan)}, loss {last['train_loss']:.4f}, "
        f"{metric} {last[f'valid_{metric}']:.4g}, best {best[f'valid_{metric}']:.4g}"
    )


def _place(plan: BatchPlan, progress: Progress) -> str:
    """Describe how far a run is, in epochs or steps."""
    if plan.steps is not None:
        return f"step {progress.steps}"
    return f"epoch {progress.rounds[-1]['epoch'] if progress.rounds else 0}"


def _end(plan: BatchPlan) -> int:
    return plan.epochs if plan.steps is None else plan.steps
