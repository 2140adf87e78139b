"""Train the recipes of tables, several at a time, and add their rows to each results.csv.

    python reproduction/run.py primal_attention/table1_uea --jobs 2 --select model=primalformer

Runs that have a row are skipped, so a batch that was stopped goes on where it was.
"""

import argparse
import importlib.util
import multiprocessing as mp
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path

from primal_attention.training.recipe import Recipe
from primal_attention.training.results import KEY, Row, add_rows, current_commit, key_of, read_rows

HERE = Path(__file__).parent


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and stop the workers
    arguments = parse_arguments()
    left = [
        (table, recipe)
        for table in arguments.tables
        for recipe in missing(table, results_of(table, arguments.out), arguments)
    ]
    deadline = time.monotonic() + 60 * arguments.minutes
    for table, row in run_all(left, arguments.jobs, deadline):
        add_rows(results_of(table, arguments.out), [row])


def missing(table: str, results: Path, arguments: argparse.Namespace) -> list[Recipe]:
    """The recipes of a table that are asked for and have no row yet."""
    recipes = [
        recipe.with_settings(arguments.set)
        for recipe in table_recipes(table)
        if selected(recipe, arguments.select)
    ]
    done = [{name: row[name] for name in KEY} for row in read_rows(results)]
    left = [recipe for recipe in recipes if key_of(recipe) not in done]
    print(f"{table}: {len(recipes)} recipes, {len(recipes) - len(left)} done", flush=True)
    return left


def results_of(table: str, out: Path | None) -> Path:
    return (out or HERE) / table / "results.csv"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="+", help="folders with a recipes.py, from here")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no run after that")
    parser.add_argument("--out", type=Path, help="folder for results.csv, default: here")
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


def run_all(
    queue: list[tuple[str, Recipe]], jobs: int, deadline: float
) -> Iterator[tuple[str, Row]]:
    """The rows of the runs, as they end; after the deadline those under way are given up."""
    commit, began = current_commit(), time.monotonic()
    pool = ProcessPoolExecutor(jobs, mp.get_context("spawn"))
    try:
        running: set[Future[tuple[str, Row]]] = set()
        while queue or running:
            while queue and len(running) < jobs and time.monotonic() < deadline:
                running.add(pool.submit(run_one, *queue.pop(0), commit))
            left = max(deadline - time.monotonic(), 0)
            done, running = wait(running, left, FIRST_COMPLETED)
            if not done:
                print(f"the time is over: {len(queue) + len(running)} runs are left", flush=True)
                return
            for future in done:
                if future.exception() is not None:
                    print(f"a run failed: {future.exception()!r}", flush=True)
                    continue
                table, row = future.result()
                print(
                    f"{time.monotonic() - began:6.0f} s  {row['dataset']:20s} {row['model']:14s} "
                    f"{row['protocol']:6s} {row['seed']}  {row['value']} in {row['seconds']} s  "
                    f"({len(queue) + len(running)} left)",
                    flush=True,
                )
                yield table, row
    finally:  # not waiting for a worker that does not end: it has nothing left to do
        kill(pool)
        pool.shutdown(wait=False, cancel_futures=True)


def kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()


def run_one(table: str, recipe: Recipe, commit: str) -> tuple[str, Row]:
    """One run, in a process of its own."""
    import logging

    import torch

    from primal_attention.tasks.uea import uea_task
    from primal_attention.training import launch, train
    from primal_attention.training.results import row_of

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    torch.backends.cuda.enable_cudnn_sdp(False)  # training through it ended in NaN now and then
    name = recipe.task.partition("/")[2]
    valid = "test" if recipe.valid_fraction is None else recipe.valid_fraction
    task = uea_task(name, valid=valid, seed=recipe.seed)
    outcome = train(recipe, task, launch(recipe.precision, devices=1))
    return table, row_of(outcome, commit)


if __name__ == "__main__":
    main()
