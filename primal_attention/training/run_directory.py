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
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.tasks import Task
from primal_attention.training.checkpoint import read_checkpoint
from primal_attention.training.logs import MetricsFile, TensorBoard
from primal_attention.training.loop import BEST, train
from primal_attention.training.progress import Outcome, Watcher, Watchers
from primal_attention.training.recipe import Recipe
from primal_attention.training.recipes import find_recipe
from primal_attention.whole_files import write_text

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
    """
    found = _begin(directory, recipe) if fabric.is_global_zero else None
    found = fabric.broadcast(found)
    if found is not None:
        return found
    logs = [MetricsFile(directory), *([TensorBoard(directory)] if tensorboard else [])]
    outcome = train(
        recipe,
        task,
        fabric,
        directory=directory,
        watcher=Watchers([*logs, watcher or Watcher()]),
        save_every=save_every,
        until=until,
    )
    if fabric.is_global_zero:
        write_text(directory / RESULT, _to_json(outcome))
    return outcome


def directory_of(out: Path, recipe: Recipe) -> Path:
    """Where a run goes; settings that are not the named recipe's have a place of their own."""
    named = find_recipe(recipe.task, recipe.model, recipe.protocol, recipe.seed)
    ours, theirs = (json.loads(each.to_json()) for each in (recipe, named))
    changed = {name: value for name, value in ours.items() if value != theirs[name]}
    name = f"seed{recipe.seed}"
    if changed:
        text = json.dumps(changed, sort_keys=True)
        name += f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return out / recipe.task / recipe.model / recipe.protocol / name


def read_outcome(directory: Path) -> Outcome:
    """What came of the run in a directory, once it is over."""
    path = directory / RESULT
    if not path.is_file():
        raise FileNotFoundError(f"no run is over in {directory}: there is no {RESULT}")
    values = json.loads(path.read_text())
    recipe = Recipe.from_json(json.dumps(values.pop("recipe")))
    return Outcome(recipe=recipe, **values, weights=read_checkpoint(directory / BEST).tensors)


def _begin(directory: Path, recipe: Recipe) -> Outcome | None:
    """The outcome that is there already; else the directory is made ready."""
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / RECIPE).exists():
        recipe.check_same(Recipe.from_json((directory / RECIPE).read_text()), directory)
    else:
        write_text(directory / RECIPE, recipe.to_json())
    return read_outcome(directory) if (directory / RESULT).exists() else None


def _to_json(outcome: Outcome) -> str:
    names = [each.name for each in fields(outcome) if each.name not in ("recipe", "weights")]
    values = {name: getattr(outcome, name) for name in names}
    return json.dumps({"recipe": json.loads(outcome.recipe.to_json()), **values}, indent=1)
