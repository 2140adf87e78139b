"""A run in a directory of its own: what it is, how it goes, what came of it.

====================  ==========================================================================
``recipe.json``       the recipe
``metrics.csv``       one row for each round that is done
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
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from primal_attention.atomic_files import fitting, holding, write_text, writing_to
from primal_attention.tasks import Task
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.devices import from_first, with_peers
from primal_attention.training.domains import find_recipe
from primal_attention.training.loop import Saving, train_alone
from primal_attention.training.outcome import Outcome
from primal_attention.training.recipe import Recipe
from primal_attention.training.watchers import Watcher

if TYPE_CHECKING:
    from lightning_fabric import Fabric
    from torch.distributed.device_mesh import DeviceMesh

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
    context: DeviceMesh | None = None,
) -> Outcome:
    """Train a recipe in a directory: go on from the last checkpoint, or read the outcome.

    Args:
        directory: Where checkpoints, metrics and outcome go.
        recipe: What to train and how.
        task: The cases, loss and metric.
        fabric: From ``launch``.
        watcher: Is told how it goes.
        save_every: Least number of seconds between two checkpoints.
        until: The ``time.time()`` at which it has to stop. The round under way ends and is saved.
        context: From ``context_mesh``: processes that share the tokens of each case.

    Raises:
        HeldError: Another process trains there.
        LostPeerError: One of the processes that train together is gone.
        OutOfTimeError: The run stopped there; called again it goes on.
        UnreadableFileError: A file of the run is damaged, or of something else.
    """
    with _alone_in(directory, fabric):
        outcome = from_first(fabric, lambda: _begin(directory, recipe))
        if outcome is None:
            saving = Saving(save_every, until)
            outcome = train_alone(recipe, task, fabric, directory, watcher, saving, context)
            text = _to_json(outcome)
            from_first(fabric, lambda: write_text(directory / RESULT, text))
    return outcome


@contextmanager
def _alone_in(directory: Path, fabric: Fabric) -> Iterator[None]:
    """Hold a directory, which is made, against other runs; the first process does it for all."""
    with ExitStack() as held:

        def hold() -> None:
            with writing_to(directory, directory, *directory.parents):
                directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(holding(directory))

        with with_peers(fabric):
            from_first(fabric, hold)
            yield


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
    with fitting(path, "the outcome of a run"):
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
    with fitting(path, "the recipe of a run"):
        return Recipe.from_json(path.read_text(encoding="utf-8"))


def _begin(directory: Path, recipe: Recipe) -> Outcome | None:
    """Read the outcome of the same recipe; else prepare the directory."""
    found = read_recipe(directory)
    if found is None:
        write_text(directory / RECIPE, recipe.to_json())
    else:
        recipe.check_same(found, directory)
    whole = (directory / RESULT).exists() and (directory / BEST).exists()
    return read_outcome(directory) if whole else None


def _to_json(outcome: Outcome) -> str:
    names = [each.name for each in fields(outcome) if each.name not in ("recipe", "weights")]
    values = {name: getattr(outcome, name) for name in names}
    return json.dumps({"recipe": json.loads(outcome.recipe.to_json()), **values}, indent=1)
