"""Watchers of a run: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from primal_attention.extras import needing
from primal_attention.training.batch_plan import BatchPlan
from primal_attention.training.outcome import Entry, Progress
from primal_attention.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console


class Watcher:
    """Observer of a run and of its refit, in the first process alone; this one does nothing."""

    def start(self, recipe: Recipe, plan: BatchPlan, progress: Progress) -> None:
        """Begin, or resume after the rounds of the progress, which grows as it runs."""

    def step(self, step: int) -> None:
        """Note a step."""

    def round(self, entry: Entry) -> None:
        """Note the end of a round, which is the last one of the progress."""

    def stop(self) -> None:
        """Finish, at the end of a run or at an interruption."""


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
