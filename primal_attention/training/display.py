"""How a run goes, for someone who looks on: a bar in a terminal, else a line now and then."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from primal_attention.training.order import Plan
from primal_attention.training.progress import Entry, Progress, Watcher
from primal_attention.training.recipe import Recipe

if TYPE_CHECKING:
    from rich.console import Console


def progress_bar(console: Console | None = None) -> Watcher:
    """A bar where the console is a terminal; else lines, such as a log file can hold."""
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        message = "a progress bar needs Rich: pip install 'primal-attention[cli]'"
        raise ModuleNotFoundError(message, name="rich") from error
    console = console or Console(stderr=True)
    return _Bar(console) if console.is_terminal else Lines(console)


class Lines(Watcher):
    """A line at the end of a round, not more often than every so many seconds."""

    def __init__(self, console: Console, every: float = 5.0):
        self.console, self.every = console, every

    def start(self, recipe: Recipe, plan: Plan, progress: Progress) -> None:
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

    def start(self, recipe: Recipe, plan: Plan, progress: Progress) -> None:
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
        """A bar again."""
        return self


def _told(plan: Plan, progress: Progress) -> str:
    """The last and the best round in words."""
    if not progress.rounds:
        return f"{_place(plan, progress)}/{_end(plan)}"
    last, best = progress.rounds[-1], progress.rounds[progress.best]
    metric = next(reversed(last)).removeprefix("valid_")
    return (
        f"{_place(plan, progress)}/{_end(plan)}, loss {last['train_loss']:.4f}, "
        f"{metric} {last[f'valid_{metric}']:.4g}, best {best[f'valid_{metric}']:.4g}"
    )


def _place(plan: Plan, progress: Progress) -> str:
    """How far a run is, in what it is counted in."""
    if plan.steps is not None:
        return f"step {progress.steps}"
    return f"epoch {progress.rounds[-1]['epoch'] if progress.rounds else 0}"


def _end(plan: Plan) -> int:
    return plan.epochs if plan.steps is None else plan.steps
