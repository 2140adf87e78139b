"""Train the recipes of a table, several at a time, and add their rows to its results.csv.

    python reproduction/run.py primal_attention/table1_uea --jobs 2 --select model=primalformer

Runs that have a row are skipped, so a batch that was stopped goes on where it was.
"""

import argparse
import importlib.util
import multiprocessing as mp
import os
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from primal_attention.training.recipe import Recipe
from primal_attention.training.results import Row, add_rows, current_commit, key_of, read_rows

HERE = Path(__file__).parent


def main() -> None:
    arguments = parse_arguments()
    results = arguments.results or HERE / arguments.table / "results.csv"
    recipes = [
        recipe.with_settings(arguments.set)
        for recipe in table_recipes(arguments.table)
        if selected(recipe, arguments.select)
    ]
    done = {tuple(row[name] for name in key_of(recipes[0])) for row in read_rows(results)}
    left = [recipe for recipe in recipes if tuple(key_of(recipe).values()) not in done]
    print(f"{len(recipes)} recipes, {len(recipes) - len(left)} done, {len(left)} to run")
    deadline = time.monotonic() + 60 * arguments.minutes
    for row in run_all(left, arguments.jobs, deadline):
        add_rows(results, [row])
    print(f"results are in {results}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", help="folder of recipes.py, relative to this file's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after that")
    parser.add_argument("--results", type=Path, help="default: results.csv of the folder")
    parser.add_argument("--select", nargs="*", default=[], help="key=value,value of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to all recipes")
    return parser.parse_args()


def table_recipes(table: str) -> list[Recipe]:
    """What the folder's recipes.py lists, the longest sequences first."""
    path = HERE / table / "recipes.py"
    spec = importlib.util.spec_from_file_location("recipes", path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"there is no {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.recipes())


def selected(recipe: Recipe, conditions: Iterable[str]) -> bool:
    for condition in conditions:
        key, _, values = condition.partition("=")
        value = recipe.task.partition("/")[2] if key == "dataset" else str(getattr(recipe, key))
        if value not in values.split(","):
            return False
    return True


def run_all(recipes: list[Recipe], jobs: int, deadline: float) -> Iterable[Row]:
    """The rows of the runs, as they end; after the deadline those under way are given up."""
    commit = current_commit()
    queue, began = list(recipes), time.monotonic()
    with ProcessPoolExecutor(jobs, mp.get_context("spawn")) as pool:
        running: set[Future[Row]] = set()
        while queue or running:
            while queue and len(running) < jobs and time.monotonic() < deadline:
                running.add(pool.submit(run_one, queue.pop(0), commit))
            left = max(deadline - time.monotonic(), 0)
            done, running = wait(running, left, FIRST_COMPLETED)
            if not done:
                print(f"the time is over: {len(queue) + len(running)} runs are left", flush=True)
                kill(pool)
                return
            for future in done:
                row = future.result()
                print(
                    f"{time.monotonic() - began:6.0f} s  {row['dataset']:20s} {row['model']:14s} "
                    f"{row['protocol']:6s} {row['seed']}  {row['value']} in {row['seconds']} s  "
                    f"({len(queue) + len(running)} left)",
                    flush=True,
                )
                yield row


def kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()


def run_one(recipe: Recipe, commit: str) -> Row:
    """One run, in a process of its own."""
    import logging

    import torch

    from primal_attention.tasks.uea import uea_task
    from primal_attention.training import launch, train
    from primal_attention.training.results import row_of

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    name = recipe.task.partition("/")[2]
    valid = "test" if recipe.valid_fraction is None else recipe.valid_fraction
    task = uea_task(name, valid=valid, seed=recipe.seed)
    return row_of(train(recipe, task, launch(recipe.precision, devices=1)), commit)


if __name__ == "__main__":
    main()
