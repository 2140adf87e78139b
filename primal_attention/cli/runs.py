"""What training, evaluation and sweeps share: recipes, data and run directories."""

from collections.abc import Sequence
from pathlib import Path

import torch

from primal_attention.attention import options_of
from primal_attention.cli.mistakes import naming
from primal_attention.models.stacks import mechanism_of
from primal_attention.tasks import Sizes, Task
from primal_attention.training.domains import find_recipe, task_of
from primal_attention.training.model_factory import build_model
from primal_attention.training.recipe import Recipe, nearest
from primal_attention.training.run_directory import read_recipe

_OWN_OPTIONS = {"task": "TASK", "model": "--model", "protocol": "--protocol", "seed": "--seed"}


def recipe_of(task: str, model: str, protocol: str, seed: int, settings: Sequence[str]) -> Recipe:
    """The recipe that a command asks for."""
    with naming():
        recipe = find_recipe(task, model, protocol, seed)
    with naming("--set"):
        for setting in settings:
            key = setting.partition("=")[0]
            if key in _OWN_OPTIONS:
                raise ValueError(f"{key} is given as {_OWN_OPTIONS[key]}, got {setting!r}")
            _check_option(key, model)
        return recipe.with_settings(settings)


def _check_option(key: str, model: str) -> None:
    """An option of the mechanism is one that it has."""
    prefix, dot, option = key.partition(".")
    mechanism = mechanism_of(model)
    names = options_of(mechanism)
    if prefix == "attention" and dot and option not in names:
        hint = nearest(option, sorted(names))
        raise ValueError(f"{mechanism} attention has no option {option!r}; {hint}")


def load_task(recipe: Recipe, folder: Path | None) -> Task:
    """The data of a recipe, split as it says."""
    with naming("TASK" if folder is None else "TASK or --data"):
        return task_of(recipe, folder)


def check_model(recipe: Recipe, sizes: Sizes) -> None:
    """Raise where no model can be built from a recipe; takes no memory."""
    with naming("--set"), torch.device("meta"):
        build_model(recipe, sizes)


def check_directory(directory: Path, recipe: Recipe) -> None:
    """Raise where the directory holds a run of another recipe."""
    with naming("--out"):
        found = read_recipe(directory)
        if found is not None:
            recipe.check_same(found, directory)
