"""Arguments that commands share: their types, what they stand for, what is wrong with them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer

from primal_attention.attention import options_of
from primal_attention.models.stacks import mechanism_of
from primal_attention.tasks import Task
from primal_attention.training import Recipe, build_model, find_recipe, task_of
from primal_attention.training.recipe import nearest
from primal_attention.training.run_directory import read_recipe

TaskName = Annotated[str, typer.Argument(help="For instance uea/JapaneseVowels or lra/listops.")]
Model = Annotated[str, typer.Option(help="primalformer, primal_plus, softmax, ...")]
Protocol = Annotated[str, typer.Option(help="clean, or paper.")]
Seed = Annotated[int, typer.Option(help="Of weights, order and split.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="A setting key=value, as often as you like; primal settings lists them."
    ),
]
Runs = Annotated[Path, typer.Option(help="Folder of all runs.")]
Data = Annotated[Path | None, typer.Option(help="Folder of the data set.")]
Accelerator = Annotated[str, typer.Option(help="auto, cpu, cuda, ...")]
Quiet = Annotated[bool, typer.Option(help="No progress, only the outcome.")]
Checkpoint = Annotated[Path, typer.Argument(help="A best.safetensors, or its directory.")]
Split = Annotated[str, typer.Option(help="test, valid or train.")]

SPLITS = ("test", "valid", "train")
_OWN_OPTIONS = {"task": "TASK", "model": "--model", "protocol": "--protocol", "seed": "--seed"}


@contextmanager
def naming(argument: str | None = None) -> Iterator[None]:
    """Report an error of an argument in one line and exit with 2; for checks before long work."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise typer.BadParameter(str(error), param_hint=argument) from error


def check_files(files: Iterable[Path]) -> None:
    """Raise unless all files are there."""
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}")


def check_name(kind: str, name: str, names: Collection[str]) -> None:
    """Raise unless a name is one of those that there are."""
    if name not in names:
        raise ValueError(f"no {kind} is called {name!r}; {nearest(name, names)}")


def recipe_of(task: str, model: str, protocol: str, seed: int, settings: Sequence[str]) -> Recipe:
    """Return the recipe that a command asks for."""
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
    """Raise where the mechanism has no option ``attention.option``."""
    prefix, dot, option = key.partition(".")
    mechanism = mechanism_of(model)
    names = options_of(mechanism)
    if prefix == "attention" and dot and option not in names:
        hint = nearest(option, sorted(names))
        raise ValueError(f"{mechanism} attention has no option {option!r}; {hint}")


def load_task(recipe: Recipe, folder: Path | None) -> Task:
    """Load the data of a recipe, split as it says."""
    with naming("TASK" if folder is None else "TASK or --data"):
        return task_of(recipe, folder)


def load_task_of_model(recipe: Recipe, folder: Path | None) -> Task:
    """Load the data of a recipe; raise where no model can be built for them, allocating nothing."""
    task = load_task(recipe, folder)
    with naming("--set"), torch.device("meta"):
        build_model(recipe, task.sizes)
    return task


def check_directory(directory: Path, recipe: Recipe) -> None:
    """Raise where the directory holds a run of another recipe."""
    with naming("--out"):
        found = read_recipe(directory)
        if found is not None:
            recipe.check_same(found, directory)
