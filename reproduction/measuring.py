"""Train the recipes of a study, keep their runs, and measure the trained models.

A program that measures gives `main` a function from a trained run to rows of numbers. Runs go
through the ordinary loop, as with run.py, and have their rows in results.csv; the numbers go to
files beside it. What has rows there is skipped; a run that is over in its directory is measured
without training it again.
"""

import argparse
import csv
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import run
from torch import nn

from primal_attention.atomic_files import write_rows
from primal_attention.tasks import Task
from primal_attention.training.recipe import Recipe
from primal_attention.training.results import Row, add_rows, current_commit, key_of, read_rows
from primal_attention.training.run_directory import RESULT, directory_of


class Trained(NamedTuple):
    """A run that is over: its best model in evaluation mode, on the CPU, and its cases."""

    recipe: Recipe
    model: nn.Module
    task: Task


Numbers = dict[str, Any]
Measure = Callable[[Trained], dict[str, list[Numbers]]]
"""From a run to rows of numbers, by the name of their file."""


def main(measure: Measure, file: str, arguments: argparse.Namespace) -> None:
    """Train what has no numbers in the file of its table yet, then measure it."""
    for table in arguments.tables:
        folder = run.results_of(table, arguments.out).parent
        recipes = wanted(table, folder / file, arguments)
        train(table, recipes, arguments)
        for files in measured(measure, recipes, arguments):
            for name, rows in files.items():
                add_numbers(folder / name, rows)


def parse_arguments(about: str, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("tables", nargs="+", help="folders with a recipes.py, from here")
    parser.add_argument("--runs", type=Path, required=True, help="folder where runs are kept")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no run after that")
    parser.add_argument("--out", type=Path, help="folder for the files, default: here")
    parser.add_argument("--select", nargs="*", default=[], help="key=value,value of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to all recipes")
    arguments = parser.parse_args()
    arguments.deadline = time.time() + 60 * arguments.minutes
    return arguments


def wanted(table: str, path: Path, arguments: argparse.Namespace) -> list[Recipe]:
    """The recipes that are asked for and have no numbers."""
    done = {run.run_of(row) for row in read_numbers(path)}
    recipes = [
        recipe.with_settings(arguments.set)
        for recipe in run.table_recipes(table)
        if run.selected(recipe, arguments.select)
    ]
    left = [recipe for recipe in recipes if run.run_of(key_of(recipe)) not in done]
    print(f"{table}: {len(recipes)} recipes, {len(recipes) - len(left)} measured", flush=True)
    return left


def train(table: str, recipes: Iterable[Recipe], arguments: argparse.Namespace) -> None:
    """Select the runs that are unfinished, or lack a row in results.csv."""
    path = run.results_of(table, arguments.out)
    done = {run.run_of(row) for row in read_rows(path)}
    queue = [
        (table, recipe)
        for recipe in recipes
        if run.run_of(key_of(recipe)) not in done or not is_over(recipe, arguments.runs)
    ]
    for _, row in run.run_all(queue, arguments.jobs, arguments.deadline, arguments.runs):
        add_rows(path, [row])


def is_over(recipe: Recipe, runs: Path) -> bool:
    return (directory_of(runs, recipe) / RESULT).exists()


def measured(
    measure: Measure, recipes: Iterable[Recipe], arguments: argparse.Namespace
) -> Iterable[dict[str, list[Row]]]:
    """The rows of each run that is over, as they come."""
    over = [recipe for recipe in recipes if is_over(recipe, arguments.runs)]
    work = partial(measure_one, measure, arguments.runs, current_commit())
    workers = min(len(over), os.cpu_count() or 1) or 1
    with ProcessPoolExecutor(workers, mp.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, recipe) for recipe in over]):
            yield future.result()


def measure_one(measure: Measure, runs: Path, commit: str, recipe: Recipe) -> dict[str, list[Row]]:
    """The rows of one run by file, in a process of its own."""
    import torch

    from primal_attention.training import task_of
    from primal_attention.training.model_factory import load_trained

    torch.set_num_threads(1)
    model = load_trained(directory_of(runs, recipe)).model
    files = measure(Trained(recipe, model, task_of(recipe)))
    key = key_of(recipe)
    return {
        name: [{**key, **texts(each), "commit": commit} for each in rows]
        for name, rows in files.items()
    }


def texts(numbers: Numbers) -> Row:
    return {
        name: f"{value:.6g}" if isinstance(value, float) else str(value)
        for name, value in numbers.items()
    }


def read_numbers(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_numbers(path: Path, rows: list[Row]) -> None:
    """The file with the rows of a run, in place of those that it had."""
    keys = {run.run_of(row) for row in rows}
    kept = [row for row in read_numbers(path) if run.run_of(row) not in keys]
    merged = sorted([*kept, *rows], key=run.run_of)
    write_rows(path, merged)
