"""A run in a directory of its own: what it is, how it goes, what came of it.

====================  ==========================================================================
``recipe.json``       the recipe
``metrics.csv``       one row for each round that is done
``tensorboard/``      the same for TensorBoard
``last.safetensors``  all that it takes to go on
``best.safetensors``  the weights of the best round, and what it takes to use them
``result.json``       what came of it; there once the run is over
====================  ==========================================================================
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.atomic_files import UnreadableFileError, write_text
from primal_attention.tasks import Task
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.devices import from_first, with_peers
from primal_attention.training.domains import find_recipe
from primal_attention.training.loop import Saving, alone_in, train_alone
from primal_attention.training.outcome import Outcome
from primal_attention.training.recipe import Recipe
from primal_attention.training.watchers import MetricsFile, TensorBoard, Watcher, Watchers

if TYPE_CHECKING:
    from lightning_fabric import Fabric

RECIPE, RESULT = "recipe.json", "result.json"


def train_in(
    directory: Path,
    recipe: Recipe,
    task: Task,
    fabric: Fabric,
    *,
    watcher: Watcher | None = None,
    save_every: float = 30.0,
    until: float = math.inf,
    tensorboard: bool = True,
) -> Outcome:
    """Train in a directory, whatever happened there before.

    A run that was interrupted goes on as if it had not been; of one that is over the outcome is
    read. The arguments are those of ``train``; ``tensorboard=False`` leaves its files out.

    Raises:
        HeldError: Another process trains there.
        UnreadableFileError: A file of the run is damaged, or of something else.
    """
    with with_peers(fabric):
        found = from_first(fabric, lambda: _outcome_in(directory, recipe))
    if found is not None:
        return found
    with alone_in(directory, fabric):
        found = from_first(fabric, lambda: _begin(directory, recipe))
        if found is not None:  # another process ended it in the meantime
            return found
        logs = [MetricsFile(directory), *([TensorBoard(directory)] if tensorboard else [])]
        watchers = Watchers([*logs, watcher or Watcher()])
        saving = Saving(save_every, until)
        outcome = train_alone(recipe, task, fabric, directory, watchers, saving)
        from_first(fabric, lambda: write_text(directory / RESULT, _to_json(outcome)))
    return outcome


def directory_of(out: Path, recipe: Recipe) -> Path:
    """Return the directory of a run; settings other than the named recipe's add a hash."""
    named = find_recipe(recipe.task, recipe.model.name, recipe.run.protocol, recipe.run.seed)
    ours, theirs = (json.loads(each.to_json()) for each in (recipe, named))
    changed = {name: value for name, value in ours.items() if value != theirs[name]}
    name = f"seed{recipe.run.seed}"
    if changed:
        text = json.dumps(changed, sort_keys=True)
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return out / recipe.task / recipe.model.name / recipe.run.protocol / name


def read_outcome(directory: Path) -> Outcome:
    """Read the outcome of the run in a directory, once it is over."""
    path = directory / RESULT
    if not path.is_file():
        raise FileNotFoundError(f"no run is over in {directory}: there is no {RESULT}")
    weights = read_checkpoint(directory / BEST).tensors
    with _reading(path, "the same command makes it again once it is removed"):
        values = json.loads(path.read_text(encoding="utf-8"))
        recipe = Recipe.from_json(json.dumps(values.pop("recipe")))
        outcome = Outcome(recipe=recipe, **values, weights=weights)
        outcome.check()
    return outcome


def read_recipe(directory: Path) -> Recipe | None:
    """Read the recipe of the run in a directory; None where there is none."""
    path = directory / RECIPE
    if not path.exists():
        return None
    with _reading(path, "remove it, and its recipe is taken from the command"):
        return Recipe.from_json(path.read_text(encoding="utf-8"))


@contextmanager
def _reading(path: Path, remedy: str) -> Iterator[None]:
    """Name a file of JSON that is damaged, or says something else."""
    try:
        yield
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        raise UnreadableFileError(f"{path} is damaged: {reason}; {remedy}") from error


def _outcome_in(directory: Path, recipe: Recipe) -> Outcome | None:
    """Read the outcome of the same recipe; None where result or weights are missing."""
    found = read_recipe(directory)
    if found is not None:
        recipe.check_same(found, directory)
    whole = (directory / RESULT).exists() and (directory / BEST).exists()
    return read_outcome(directory) if whole else None


def _begin(directory: Path, recipe: Recipe) -> Outcome | None:
    """Read the outcome that is there already; else prepare the directory."""
    if not (directory / RECIPE).exists():
        write_text(directory / RECIPE, recipe.to_json())
    return _outcome_in(directory, recipe)


def _to_json(outcome: Outcome) -> str:
    names = [each.name for each in fields(outcome) if each.name not in ("recipe", "weights")]
    values = {name: getattr(outcome, name) for name in names}
    return json.dumps({"recipe": json.loads(outcome.recipe.to_json()), **values}, indent=1)
