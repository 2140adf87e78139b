"""What a run leaves to read: ``metrics.csv`` and the files of TensorBoard.

Both are written anew from the rounds that were saved when a run is resumed, so that a run that was
killed has neither gaps nor repeats.
"""

from pathlib import Path
from typing import Any

from primal_attention.atomic_files import write_rows, writing_to
from primal_attention.training.order import Plan
from primal_attention.training.progress import Entry, Progress, Watcher
from primal_attention.training.recipe import Recipe

METRICS, TENSORBOARD = "metrics.csv", "tensorboard"


class MetricsFile(Watcher):
    """One row a round in ``metrics.csv``: exactly the rounds that are done."""

    def __init__(self, directory: Path):
        self.path = directory / METRICS

    def start(self, recipe: Recipe, plan: Plan, progress: Progress) -> None:
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

    def start(self, recipe: Recipe, plan: Plan, progress: Progress) -> None:
        """Begin a file with the rounds that are done, in place of those there were."""
        with writing_to(self.directory / TENSORBOARD):
            for old in (self.directory / TENSORBOARD).glob("events.out.tfevents.*"):
                old.unlink()
            self.logger = _logger(self.directory)
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


def _logger(directory: Path) -> Any:
    from lightning_fabric.loggers.tensorboard import TensorBoardLogger

    try:
        return TensorBoardLogger(directory, name=TENSORBOARD, version="", flush_secs=10)
    except ModuleNotFoundError as error:
        message = "logs for TensorBoard need it: pip install 'primal-attention[train]'"
        raise ModuleNotFoundError(message, name="tensorboard") from error
