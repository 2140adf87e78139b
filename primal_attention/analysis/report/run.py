"""A run that is over, as a report reads it: what came of it, its model, where it was made."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from primal_attention.atomic_files import fitting
from primal_attention.tasks import Sizes
from primal_attention.training.checkpoint import read_checkpoint
from primal_attention.training.domains import find_recipe
from primal_attention.training.loop import BEST
from primal_attention.training.model_factory import trained_model
from primal_attention.training.progress import Outcome
from primal_attention.training.recipe import Recipe
from primal_attention.training.results import Row, current_commit, key_of, read_rows
from primal_attention.training.run_directory import RESULT, read_outcome
from primal_attention.training.tables import RESULTS, printed_in

_NOT_RECORDED = "not recorded"
_FOLDERS_ABOVE = 6  # among which the results file of a run is looked for


class Printed(NamedTuple):
    """What a paper has for the same set and model."""

    number: float
    table: str


@dataclass(frozen=True)
class Run:
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
        """What it is counted in."""
        return "epoch" if self.recipe.steps is None else "step"

    @property
    def chooser(self) -> str:
        """The cases that chose the best round."""
        return "test" if self.recipe.valid_fraction is None else "validation"

    @property
    def best_round(self) -> Mapping[str, float]:
        """Its epoch, step, losses and metric."""
        return self.outcome.rounds[self.outcome.best]

    @property
    def num_parameters(self) -> int:
        """Of the model, frozen ones included."""
        return sum(each.numel() for each in self.model.parameters())


def read_run(directory: Path) -> Run:
    """The run in a directory; an error says what is missing or damaged."""
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
    return Run(directory, outcome, model, checkpoint.facts)


def settings(recipe: Recipe) -> dict[str, str]:
    """Every setting by name, options of the mechanism under ``attention.``."""
    values = {each.name: getattr(recipe, each.name) for each in fields(recipe)}
    options = values.pop("attention")
    values |= {f"attention.{name}": each for name, each in options.items()}
    return {
        name: each if isinstance(each, str) else json.dumps(each) for name, each in values.items()
    }


def changes(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Settings that differ from the named recipe: of the run, and of that."""
    ours, named = settings(recipe), settings(_named(recipe))
    pairs = {name: (ours.get(name, "default"), named.get(name, "default")) for name in ours | named}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _named(recipe: Recipe) -> Recipe:
    try:
        return find_recipe(recipe.task, recipe.model, recipe.protocol, recipe.seed)
    except ValueError:  # a task of someone's own
        return Recipe(recipe.task, recipe.model, recipe.protocol, recipe.seed)


def printed(recipe: Recipe, suite: Path) -> Printed | None:
    """The paper's number, where a folder has a table with it."""
    found = printed_in(suite, recipe)
    return None if found is None else Printed(*found)


def environment(run: Run) -> dict[str, str]:
    """Where and with what the run was made, as far as it was written down."""
    row = _recorded(run)
    ended = datetime.fromtimestamp((run.directory / RESULT).stat().st_mtime, UTC)
    return {
        "device": run.outcome.device,
        "training time": f"{run.outcome.seconds:.1f} s, {run.outcome.steps} steps",
        "result written": _moment(ended),
        "torch": row.get("torch", _NOT_RECORDED),
        "commit": row.get("commit", _NOT_RECORDED),
        "directory": str(run.directory),
    }


def environment_of_report() -> dict[str, str]:
    """Where and with what this page is made."""
    return {
        "page written": _moment(datetime.now(UTC)),
        "primal-attention": _version(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "commit": current_commit(),
    }


def _recorded(run: Run) -> Row:
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


def _version() -> str:
    try:
        return version("primal-attention")
    except PackageNotFoundError:  # run from its source without an installation
        return _NOT_RECORDED


def _moment(time: datetime) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC")
