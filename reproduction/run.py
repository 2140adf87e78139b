"""Train the recipes of tables, several at a time, and add their rows to each results.csv.

    python reproduction/run.py primal_attention/table1_uea --jobs 2 --select model=primalformer
    python reproduction/run.py --plan reproduction/arena.toml --jobs 6 --runs runs/arena

Runs that have a row are skipped, so a batch that was stopped goes on where it was. With --runs each
run has a directory with its checkpoint there: one that is out of time is saved and stopped, and
goes on exactly when the same command is given again. A plan lists recipes of several tables with
changes of their own, the most wanted first.

Tasks of the Long Range Arena that are not prepared are prepared first: read from their files, or
generated (ListOps, Pathfinder).
"""

import argparse
import importlib.util
import multiprocessing as mp
import os
import signal
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from primal_attention.tasks import find_lra, prepare_lra
from primal_attention.training.recipe import Recipe
from primal_attention.training.results import KEY, Row, add_rows, current_commit, key_of, read_rows

HERE = Path(__file__).parent
GRACE = 120.0  # seconds for a run to end its round and be saved


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and stop the workers
    arguments = parse_arguments()
    wanted = [(each.table, recipe) for each in choices(arguments) for recipe in each.recipes()]
    left = missing(wanted, arguments.out)
    print(f"{len(wanted)} recipes, {len(wanted) - len(left)} done", flush=True)
    deadline = time.time() + 60 * arguments.minutes
    prepare(recipe for _, recipe in left)
    for table, row in run_all(left, arguments.jobs, deadline, arguments.runs):
        add_rows(results_of(table, arguments.out), [row])


def prepare(recipes: Iterable[Recipe]) -> None:
    """Write prepared files of the tasks of the arena, from their files or generated."""
    names = {recipe.set_name: None for recipe in recipes if is_lra(recipe)}
    for name in names:
        place = find_lra(name)
        if place is None or place.name != f"{name}.npz":
            print(f"preparing {name}", flush=True)
            prepare_lra(name, workers=os.cpu_count() or 1)


def is_lra(recipe: Recipe) -> bool:
    return recipe.domain == "lra"


class Choice(NamedTuple):
    """Some recipes of a table, with changes to all of them."""

    table: str
    select: Sequence[str] = ()
    set: Sequence[str] = ()

    def recipes(self) -> list[Recipe]:
        """In the order of the table."""
        chosen = [each for each in table_recipes(self.table) if selected(each, self.select)]
        return [each.with_settings(self.set) for each in chosen]


def choices(arguments: argparse.Namespace) -> list[Choice]:
    """List what the arguments name: tables with the same conditions, and the entries of a plan."""
    named = [Choice(table, arguments.select, arguments.set) for table in arguments.tables]
    return named + (read_plan(arguments.plan) if arguments.plan else [])


def read_plan(path: Path) -> list[Choice]:
    """The entries ``[[runs]]`` of a file: a table and, where wanted, select and set."""
    try:
        return [Choice(**entry) for entry in tomllib.loads(path.read_text())["runs"]]
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise SystemExit(
            f"{path} is not a plan of [[runs]] with table, select, set: {error}"
        ) from error


def missing(wanted: Iterable[tuple[str, Recipe]], out: Path | None) -> list[tuple[str, Recipe]]:
    """Select the recipes without a row, each once."""
    left: dict[tuple[str, ...], tuple[str, Recipe]] = {}
    done: dict[str, set[tuple[str, ...]]] = {}
    for table, recipe in wanted:
        if table not in done:
            done[table] = {run_of(row) for row in read_rows(results_of(table, out))}
        run = run_of(key_of(recipe))
        if run not in done[table]:
            left.setdefault((table, *run), (table, recipe))
    return list(left.values())


def run_of(row: Row) -> tuple[str, ...]:
    """Return the key that tells the run of a row from others."""
    return tuple(row[name] for name in KEY)


def results_of(table: str, out: Path | None) -> Path:
    return (out or HERE) / table / "results.csv"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tables", nargs="*", help="folders with a recipes.py, from here")
    parser.add_argument("--plan", type=Path, help="a file that lists recipes of several tables")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after that")
    parser.add_argument("--runs", type=Path, help="folder where each run keeps its checkpoint")
    parser.add_argument("--out", type=Path, help="folder for results.csv, default: here")
    parser.add_argument("--select", nargs="*", default=[], help="key=value,value of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to all recipes")
    arguments = parser.parse_args()
    if not arguments.tables and not arguments.plan:
        parser.error("give tables, or a --plan")
    if not arguments.tables and (arguments.select or arguments.set):
        parser.error("--select and --set are for tables; a plan has its own")
    return arguments


def table_recipes(table: str) -> list[Recipe]:
    """List the recipes of the folder's recipes.py, the longest sequences first."""
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
        if str(_value(recipe, key)) not in values.split(","):
            return False
    return True


def _value(recipe: Recipe, key: str) -> object:
    """A setting by its name, such as ``lr``, ``dataset`` or ``attention.landmark_jitter``."""
    if key == "dataset":
        return recipe.set_name
    options, _, name = key.rpartition(".")
    settings = recipe.flat()
    return settings[options].get(name) if options else settings[name]


def run_all(
    queue: list[tuple[str, Recipe]], jobs: int, deadline: float, runs: Path | None
) -> Iterator[tuple[str, Row]]:
    """The rows of the runs, as they end.

    After the deadline those under way are given up; those with a directory are given time to stop
    by themselves, at a checkpoint.
    """
    commit, began = current_commit(), time.time()
    end = deadline + (GRACE if runs else 0)
    pool = ProcessPoolExecutor(jobs, mp.get_context("spawn"))
    try:
        running: dict[Future[tuple[str, Row]], Recipe] = {}
        while running or (queue and time.time() < deadline):
            while queue and len(running) < jobs and time.time() < deadline:
                table, recipe = queue.pop(0)
                future = pool.submit(run_one, table, recipe, commit, runs, deadline)
                running[future] = recipe
            done, _ = wait(running, max(end - time.time(), 0), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                recipe = running.pop(future)
                if future.exception() is not None:
                    run = recipe.run
                    names = recipe.task, recipe.model.name, run.protocol, str(run.seed)
                    print(f"{' '.join(names)} has no row: {future.exception()!r}", flush=True)
                    continue
                table, row = future.result()
                left = len(queue) + len(running)
                print(f"{time.time() - began:6.0f} s  {told(row)}  ({left} left)", flush=True)
                yield table, row
        if queue or running:
            print(f"the time is over: {len(queue) + len(running)} more are left", flush=True)
    finally:  # not waiting for a worker that does not end: it has nothing left to do
        kill(pool)
        pool.shutdown(wait=False, cancel_futures=True)


def told(row: Row) -> str:
    """A row on one line."""
    return (
        f"{row['dataset']:20s} {row['model']:14s} {row['protocol']:6s} {row['seed']}  "
        f"{row['value']} in {row['seconds']} s"
    )


def kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()


def run_one(
    table: str, recipe: Recipe, commit: str, runs: Path | None, deadline: float
) -> tuple[str, Row]:
    """One run, in a process of its own."""
    import logging

    import torch

    from primal_attention.training import launch, task_of, train, train_in
    from primal_attention.training.results import row_of
    from primal_attention.training.run_directory import directory_of

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    torch.set_num_threads(int(os.environ.get("THREADS", "1")))
    torch.backends.cuda.enable_cudnn_sdp(False)  # training through it ended in NaN now and then
    task, fabric = task_of(recipe), launch(recipe.run.precision, devices=1)
    if runs is None:
        return table, row_of(train(recipe, task, fabric), commit)
    place = directory_of(runs, recipe)
    outcome = train_in(place, recipe, task, fabric, until=deadline)
    return table, row_of(outcome, commit)


if __name__ == "__main__":
    main()
