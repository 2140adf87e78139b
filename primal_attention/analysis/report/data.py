"""The data of a report: finished runs, and what their models do with test cases."""

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from primal_attention.analysis.duality import Duality, duality
from primal_attention.analysis.spectrum import Spectrum, spectrum
from primal_attention.atomic_files import fitting
from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.domains import find_recipe, task_of
from primal_attention.training.model_factory import check_data, trained_model
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
_Measured = TypeVar("_Measured")


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
    def chooser(self) -> str:
        """The cases that chose the best round."""
        return "test" if self.recipe.data.valid_fraction is None else "validation"


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
    values |= {f"attention.{name}": each for name, each in values.pop("attention").items()}
    return {
        name: each if isinstance(each, str) else json.dumps(each) for name, each in values.items()
    }


def differences(recipes: Iterable[Recipe]) -> list[tuple[str, ...]]:
    """List the settings in which recipes differ: the name, then the value of each."""
    every = [settings(recipe) for recipe in recipes]
    names = dict.fromkeys(name for each in every for name in each)
    rows = [(name, *(each.get(name, "default") for each in every)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def named_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe without changed settings."""
    chosen = recipe.task, recipe.model.name, recipe.run.protocol, recipe.run.seed
    try:
        return find_recipe(*chosen)
    except ValueError:  # a task of someone's own
        return Recipe(*chosen)


def environments(run: FinishedRun) -> list[tuple[str, str, str]]:
    """Describe where and with what the run was made, as far as recorded, and this page is."""
    row = _recorded(run)
    ended = datetime.fromtimestamp((run.directory / RESULT).stat().st_mtime, UTC)
    written = [f"{time:%Y-%m-%d %H:%M} UTC" for time in (ended, datetime.now(UTC))]
    return [
        ("written", written[0], written[1]),
        ("torch", row.get("torch", _NOT_RECORDED), torch.__version__),
        ("commit", row.get("commit", _NOT_RECORDED), current_commit()),
        ("device", run.outcome.device, "cpu"),
        ("place", str(run.directory), platform.platform()),
    ]


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


class Predictions(NamedTuple):
    """Predictions of a classifier for test cases."""

    confusion: Tensor  # [classes, classes]: cases of a class (rows) by predicted class
    labels: tuple[str, ...]
    of: int  # all test cases


class RunFindings(NamedTuple):
    """Results on test cases; in place of a result that is missing, the reason."""

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
        check_data(run.facts, task)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        if data is not None:
            raise
        reason = f"the data are not at hand: {error}"
        return RunFindings(reason, reason, reason)

    def measured(measure: Callable[[nn.Module, Any], _Measured]) -> _Measured | str:
        """Measure the attention; the reason where it has nothing of the kind."""
        try:
            return measure(run.model, _inputs(task.test, cases, track, measure.__name__))
        except ValueError as error:
            return str(error)

    predictions = _predictions(run, task, track)
    number = min(cases, len(task.test))
    return RunFindings(predictions, measured(spectrum), measured(duality), number)


def _predictions(run: FinishedRun, task: Task, track: Track) -> Predictions | str:
    if task.goal is not CLASSIFICATION:
        return f"{run.recipe.task} is no classification"
    num_classes = run.facts["sizes"]["num_outputs"]
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for indices in track(_portions(len(task.test), MOST_PREDICTED), "predictions"):
        batch = task.test[indices]
        with torch.no_grad():
            predicted = run.model(**batch.inputs).argmax(-1)
        ones = torch.ones_like(batch.target)
        confusion.index_put_((batch.target, predicted), ones, accumulate=True)
    return Predictions(
        confusion, task.labels or tuple(map(str, range(num_classes))), len(task.test)
    )


def _inputs(cases: Cases, number: int, track: Track, what: str) -> Iterator[dict[str, Tensor]]:
    for indices in track(_portions(len(cases), number), what):
        yield cases[indices].inputs


def _portions(length: int, number: int) -> Sequence[Tensor]:
    """Indices evenly spaced over all cases, which may be sorted by class, in batches."""
    number = min(number, length)
    indices = torch.arange(number) * length // number
    return torch.split(indices, _BATCH_SIZE)
