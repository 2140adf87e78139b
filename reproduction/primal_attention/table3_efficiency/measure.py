"""Measure Table 3: seconds per 1,000 training steps and peak memory, on one GPU that nobody shares.

    python reproduction/primal_attention/table3_efficiency/measure.py --select model=softmax

Each mechanism trains in bf16 as it trains for Table 2: forward, objective, backward and update,
replayed as a CUDA graph. Nothing else is in the time: no evaluation, no checkpoint, no first steps.
The symbols are made up, of the sizes and batches of the tasks, and so many of them real as there:
softmax attention passes over padding.
"""

import argparse
import logging
import math
import multiprocessing as mp
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path

import torch
from recipes import recipes

from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training import Watcher, launch
from primal_attention.training.devices import device_name
from primal_attention.training.loop import Run, Saving
from primal_attention.training.recipe import Recipe
from primal_attention.training.results import Row, add_rows, current_commit, key_of

sys.path.append(str(Path(__file__).parents[2]))
from run import selected

HERE = Path(__file__).parent
NUM_TOKENS = {"listops": 2048, "text": 4096, "retrieval": 4096, "image": 1024, "pathfinder": 1024}
CLASSES = {"listops": 10, "image": 10}  # the others have two
IMAGES = {"image": 1.0, "pathfinder": 0.34}  # the share of pixels that are not black
REVIEW, SPREAD = 970, 0.76  # texts: the median of bytes, the deviation of their logarithm
WARM_UP, BLOCKS = 10, 5


def main() -> None:
    arguments = parse_arguments()
    chosen = [recipe for recipe in recipes() if selected(recipe, arguments.select)]
    changed = [recipe.with_settings(arguments.set) for recipe in chosen]
    for recipe, future in apart(changed, arguments.steps, arguments.jobs):
        try:
            row = future.result()
        except (RuntimeError, ValueError) as error:  # the others go on
            print(f"{recipe.task} {recipe.model.name} failed: {error}", flush=True)
            continue
        add_rows(arguments.out / "results.csv", [row])
        print(told(row), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=50, help=f"of each of {BLOCKS} blocks")
    parser.add_argument("--jobs", type=int, default=3, help="processes that warm up together")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.csv")
    parser.add_argument("--select", nargs="*", default=[], help="key=value,value of the recipes")
    parser.add_argument("--set", nargs="*", default=[], help="key=value changes to all recipes")
    return parser.parse_args()


def apart(chosen: Sequence[Recipe], steps: int, jobs: int) -> Iterator[tuple[Recipe, Future[Row]]]:
    """Each in a process of its own, so that nothing is counted that another model has left behind.

    So many as there are jobs warm up together; then each has the GPU alone for its time.
    """
    for first in range(0, len(chosen), jobs):
        some = chosen[first : first + jobs]
        pools = [ProcessPoolExecutor(1, mp.get_context("spawn")) for _ in some]
        warm = [pool.submit(warm_up, recipe) for pool, recipe in zip(pools, some, strict=True)]
        wait(warm)
        for pool, recipe, run in zip(pools, some, warm, strict=True):
            with pool:
                yield recipe, run if run.exception() else pool.submit(measured, recipe, steps)


_runs: list[Run] = []  # that of this process, warm


def warm_up(recipe: Recipe) -> None:
    """The first steps, which no time counts."""
    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    torch.backends.cuda.enable_cudnn_sdp(False)
    fabric = launch(recipe.run.precision, devices=1)
    run = Run(recipe, made_up(recipe), fabric, None, Watcher(), Saving(math.inf, math.inf))
    run.model.train()
    train(run, WARM_UP)
    _runs.append(run)


def train(run: Run, steps: int) -> float:
    """The seconds that so many steps take."""
    device, size = run.fabric.device, run.recipe.optim.batch_size
    batches = torch.arange(2 * size, device=device).split(size)
    began = time.perf_counter()
    for step in range(steps):
        run.step(batches[step % 2], run.recipe.optim.lr)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def measured(recipe: Recipe, steps: int) -> Row:
    """The row of a recipe."""
    (run,) = _runs
    device = run.fabric.device
    seconds = [train(run, steps) for _ in range(BLOCKS)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else math.nan
    return {
        **dict.fromkeys(("valid", "epoch"), ""),
        **key_of(recipe),
        "metric": "seconds",
        "value": f"{1000 * statistics.median(seconds) / steps:.3f}",
        "selection": f"median of {BLOCKS} blocks",
        "steps": str(BLOCKS * steps),
        "seconds": f"{sum(seconds):.1f}",
        "device": device_name(device),
        "torch": torch.__version__,
        "commit": current_commit(),
        "peak_gb": f"{peak / 2**30:.3f}",
    }


def made_up(recipe: Recipe) -> Task:
    """Two batches of cases of the sizes of a task, and of its lengths.

    Reviews have those of IMDb, other texts all from a quarter up; black pixels lie anywhere.
    """
    name = recipe.set_name
    tokens, classes = NUM_TOKENS[name], CLASSES.get(name, 2)
    generator = torch.Generator().manual_seed(0)
    count, symbols = 2 * recipe.optim.batch_size, 16 if name == "listops" else 256

    def sequences() -> torch.Tensor:
        x = torch.randint(1, symbols, (count, tokens), generator=generator, dtype=torch.uint8)
        if name in IMAGES:
            return x * (torch.rand(x.shape, generator=generator) < IMAGES[name])
        if name == "text":
            some = torch.randn(count, 1, generator=generator)
            lengths = (REVIEW * (SPREAD * some).exp()).clamp(1, tokens)
        else:
            lengths = torch.randint(tokens // 4, tokens + 1, (count, 1), generator=generator)
        return x * (torch.arange(tokens) < lengths)

    if recipe.model.num_towers == 2:
        a, b = sequences(), sequences()
        inputs = {"a": a, "b": b, "mask_a": a != 0, "mask_b": b != 0}
    else:
        x = sequences()
        is_masked = recipe.run.protocol == "paper" or name not in IMAGES
        inputs = {"x": x, "token_mask": x != 0} if is_masked else {"x": x}
    cases = Cases(inputs, torch.randint(classes, (count,), generator=generator))
    sizes = Sizes(tokens, classes, vocab_size=32 if name == "listops" else 512)
    return Task(recipe.task, CLASSIFICATION, sizes, cases, cases, cases)


def told(row: Row) -> str:
    """A row beside the V100 of the paper, on one line."""
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    column = expected["columns"].index(row["model"])
    times = {each["dataset"]: each["paper"][column] for each in expected["rows"]}
    memory = expected["memory"][row["dataset"]][column]
    place = f"{row['dataset']:12s}{row['model']:14s}{row['protocol']:6s}"
    return (
        f"{place}{row['value']:>9s} s/1,000 steps (V100 of the paper "
        f"{times[row['dataset']]}), {row['peak_gb']} GB ({memory})"
    )


if __name__ == "__main__":
    sys.exit(main())
