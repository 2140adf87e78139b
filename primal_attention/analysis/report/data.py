"""The data of a report: finished runs, and what their models do with test cases."""

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from primal_attention.analysis.duality import Duality, duality
from primal_attention.analysis.spectrum import Spectrum, spectrum
from primal_attention.atomic_files import fitting
from primal_attention.attention.primal import PrimalAttention
from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.domains import find_recipe, task_of
from primal_attention.training.model_factory import trained_model
from primal_attention.training.outcome import Outcome
from primal_attention.training.recipe import Recipe
from primal_attention.training.results import Row, current_commit, key_of, read_rows
from primal_attention.training.run_directory import RESULT, read_outcome
from primal_attention.training.tables import RESULTS

Track = Callable[[Sequence[Tensor], str], Iterable[Tensor]]
"""Iterates over batches of work, whose description is given, and shows the progress."""
MOST_PREDICTED = 2000
_BATCH_SIZE = 8
_NOT_RECORDED = "not recorded"
_FOLDERS_ABOVE = 6  # in which the results file of a run is searched


@dataclass(frozen=True)
class FinishedRun:
    """A run directory."""

    directory: Path
    outcome: Outcome
    model: nn.Module  # of the best round, on the CPU, in evaluation mode
    facts: Mapping[str, Any]  # of its checkpoint: sizes, labels, encoding

    @property
    def recipe(self) -> Recipe:
        """All settings."""
        return self.outcome.recipe

    @property
    def unit(self) -> str:
        """The unit of its length."""
        return self.recipe.optim.unit

    @property
    def chooser(self) -> str:
        """The cases that chose the best round."""
        return "test" if self.recipe.data.valid_fraction is None else "validation"

    @property
    def best_round(self) -> Mapping[str, float]:
        """Its epoch, step, losses and metric."""
        return self.outcome.rounds[self.outcome.best]

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, frozen ones included."""
        return sum(each.numel() for each in self.model.parameters())


def read_run(directory: Path) -> FinishedRun:
    """Read the run in a directory; an error says what is missing or damaged."""
    if not directory.is_dir():
        raise FileNotFoundError(f"no run directory is at {directory}; primal train writes them")
    if not (directory / RESULT).is_file():
        raise FileNotFoundError(
            f"no run is over in {directory}: there is no {RESULT}; the same primal train command "
            "goes on with one that was stopped"
        )
    checkpoint = read_checkpoint(directory / BEST)
    outcome = read_outcome(directory)
    with fitting(directory / BEST, f"the checkpoint of {directory / RESULT}"):
        sizes = Sizes(**checkpoint.facts["sizes"])
        model = trained_model(outcome.recipe, sizes, checkpoint.tensors)
    return FinishedRun(directory, outcome, model, checkpoint.facts)


def settings(recipe: Recipe) -> dict[str, str]:
    """Return every setting by name, options of the mechanism under ``attention.``."""
    values = recipe.flat()
    options = values.pop("attention")
    values |= {f"attention.{name}": each for name, each in options.items()}
    return {
        name: each if isinstance(each, str) else json.dumps(each) for name, each in values.items()
    }


def changes(recipe: Recipe) -> list[tuple[str, str, str]]:
    """Settings that differ from the named recipe: name, value of the run, value of the recipe."""
    try:
        named = find_recipe(recipe.task, recipe.model.name, recipe.run.protocol, recipe.run.seed)
    except ValueError:  # a task of someone's own
        named = Recipe(recipe.task, recipe.model.name, recipe.run.protocol, recipe.run.seed)
    ours, theirs = settings(recipe), settings(named)
    rows = [
        (name, ours.get(name, "default"), theirs.get(name, "default")) for name in ours | theirs
    ]
    return [row for row in rows if row[1] != row[2]]


def environment(run: FinishedRun) -> dict[str, str]:
    """Describe where and with what the run was made, as far as recorded."""
    row = _recorded(run)
    ended = datetime.fromtimestamp((run.directory / RESULT).stat().st_mtime, UTC)
    return {
        "device": run.outcome.device,
        "training time": f"{run.outcome.seconds:.1f} s, {run.outcome.steps} steps",
        "result written": f"{ended:%Y-%m-%d %H:%M} UTC",
        "torch": row.get("torch", _NOT_RECORDED),
        "commit": row.get("commit", _NOT_RECORDED),
        "directory": str(run.directory),
    }


def environment_of_report() -> dict[str, str]:
    """Describe where and with what this page is made."""
    try:
        installed = version("primal-attention")
    except PackageNotFoundError:  # run from its source without an installation
        installed = _NOT_RECORDED
    return {
        "page written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "primal-attention": installed,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "commit": current_commit(),
    }


def _recorded(run: FinishedRun) -> Row:
    """The row of the run in the results file of a folder above it; empty where there is none."""
    wanted = key_of(run.recipe).items()
    for folder in run.directory.resolve().parents[:_FOLDERS_ABOVE]:
        try:
            rows = read_rows(folder / RESULTS)
        except (ValueError, OSError):  # a file of that name about something else
            continue
        for row in rows:
            if wanted <= row.items() and row["value"] == f"{run.outcome.value:.4f}":
                return row
    return {}


@dataclass(frozen=True)
class Predictions:
    """Predictions of a classifier for test cases."""

    confusion: Tensor  # [classes, classes]: cases of a class (rows) by predicted class
    labels: tuple[str, ...]
    num_cases: int
    of: int  # all test cases

    @property
    def accuracy(self) -> float:
        """In per cent."""
        return 100 * float(self.confusion.diagonal().sum()) / self.num_cases


class RunFindings(NamedTuple):
    """Results on test cases; in place of a part that is missing, the reason."""

    predictions: Predictions | str
    spectrum: Spectrum | str
    duality: Duality | str
    num_cases: int = 0


def examine(run: FinishedRun, data: Path | None, cases: int, track: Track) -> RunFindings:
    """Run the model over test cases, evenly spaced over all of them.

    Args:
        run: The run; the data must be those that it was trained on.
        data: Their folder; where it is None and they are not found, the findings say so.
        cases: How many to analyse; predictions take more.
        track: Is given the batches.
    """
    reason = "no cases were asked for"
    if cases == 0:
        return RunFindings(reason, reason, reason)
    try:
        task = task_of(run.recipe, data)
        _check_same_data(run, task)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if data is not None:
            raise
        reason = f"the data are not at hand: {error}"
        return RunFindings(reason, reason, reason)
    return RunFindings(
        _predictions(run, task, track),
        _spectrum(run, task.test, cases, track),
        _duality(run, task.test, cases, track),
        min(cases, len(task.test)),
    )


def _predictions(run: FinishedRun, task: Task, track: Track) -> Predictions | str:
    if task.goal is not CLASSIFICATION:
        return f"{run.recipe.task} is no classification"
    number, num_classes = min(len(task.test), MOST_PREDICTED), run.facts["sizes"]["num_outputs"]
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for indices in track(_portions(len(task.test), number), "predictions"):
        batch = task.test[indices]
        with torch.no_grad():
            predicted = run.model(**batch.inputs).argmax(-1)
        ones = torch.ones_like(batch.target)
        confusion.index_put_((batch.target, predicted), ones, accumulate=True)
    labels = task.labels or tuple(map(str, range(num_classes)))
    return Predictions(confusion, labels, number, len(task.test))


def _spectrum(run: FinishedRun, cases: Cases, number: int, track: Track) -> Spectrum | str:
    try:
        return spectrum(run.model, _inputs(cases, number, track, "spectra"))
    except ValueError as error:
        return str(error)


def _duality(run: FinishedRun, cases: Cases, number: int, track: Track) -> Duality | str:
    if not any(isinstance(each, PrimalAttention) for each in run.model.modules()):
        return "the model has no Primal layer"
    try:
        return duality(run.model, _inputs(cases, number, track, "duality"))
    except ValueError as error:  # a decay in all layers
        return str(error)


def _inputs(cases: Cases, number: int, track: Track, what: str) -> Iterator[dict[str, Tensor]]:
    for indices in track(_portions(len(cases), number), what):
        yield cases[indices].inputs


def _portions(length: int, number: int) -> Sequence[Tensor]:
    """Indices evenly spaced over all cases, which may be sorted by class, in batches."""
    number = min(number, length)
    indices = torch.arange(number) * length // number
    return torch.split(indices, _BATCH_SIZE)


def _check_same_data(run: FinishedRun, task: Task) -> None:
    """Check that sizes, classes and statistics of the data are those of the training."""
    encoding = task.encoding.to_dict() if task.encoding else None
    ours = asdict(task.sizes), list(task.labels), encoding
    theirs = run.facts["sizes"], list(run.facts["labels"]), run.facts["encoding"]
    if not _same(ours, theirs):
        raise ValueError(f"the data of {task.name} are not those that the model was trained on")


def _same(ours: Any, theirs: Any) -> bool:
    """Compare plain values, numbers up to rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return bool(np.isclose(ours, theirs))
    return bool(ours == theirs)
