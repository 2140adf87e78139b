"""Time one epoch of training, PrimalFormer against softmax, at the lengths of the UEA sets.

The step is the loop's own: cases from memory, forward, objective, backward, clipping, update; on a
GPU replayed as a graph. The share of the step that fetches the cases is in a column of its own.

    python benchmarks/epoch.py --out benchmarks/results
"""

import argparse
import csv
import logging
import math
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lightning_fabric import Fabric

from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training import Watcher, find_recipe, launch
from primal_attention.training.devices import device_name
from primal_attention.training.loop import Run, Saving
from primal_attention.training.results import current_commit

#   Training cases, tokens, channels and classes of the sets; the values do not matter to the time.
SETS = {
    "JapaneseVowels": (270, 26, 12, 9),
    "SpokenArabicDigits": (6600, 93, 13, 10),
    "Handwriting": (150, 152, 3, 26),
    "UWaveGestureLibrary": (120, 315, 3, 8),
    "SelfRegulationSCP1": (268, 896, 6, 2),
    "SelfRegulationSCP2": (200, 1152, 7, 2),
}
MODELS = ("softmax", "primalformer", "primal_plus")
WARM_UP = 5  # steps of each model; on a GPU the last of them is recorded and replayed


def main() -> None:
    arguments = parse_arguments()
    logging.disable(logging.WARNING)
    fabric = launch(arguments.precision, accelerator=arguments.accelerator, devices=1)
    rows, commit = [], current_commit()  # before the rows are changed, which are part of it
    for name in arguments.sets:
        for protocol in ("paper", "clean"):
            times = time_steps(name, protocol, fabric, arguments)
            for model, (step, fetch) in times.items():
                row = {
                    "dataset": name,
                    "tokens": SETS[name][1],
                    "protocol": protocol,
                    "model": model,
                    "precision": arguments.precision,
                    "step_ms": f"{step:.3f}",
                    "epoch_s": f"{step * -(-SETS[name][0] // 16) / 1e3:.3f}",
                    "against_softmax": f"{step / times['softmax'][0]:.3f}",
                    "fetch_percent": f"{100 * fetch / step:.2f}",
                    "device": device_name(fabric.device),
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                    "commit": commit,
                }
                print("  ".join(f"{value!s:>12}" for value in list(row.values())[:9]), flush=True)
                rows.append(row)
        if arguments.out is not None:
            write(rows, arguments.out)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", nargs="*", choices=SETS, default=list(SETS))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder for the CSV file")
    return parser.parse_args()


def random_task(cases: int, tokens: int, channels: int, classes: int) -> Task:
    x = torch.randn(cases, tokens, channels)
    mask = torch.arange(tokens) < torch.randint(max(tokens // 2, 1), tokens + 1, (cases, 1))
    target = torch.arange(cases) % classes
    split = Cases({"x": x, "token_mask": mask}, target)
    sizes = Sizes(tokens, classes, num_channels=channels)
    return Task("random", CLASSIFICATION, sizes, split, split, split)


def time_steps(
    name: str, protocol: str, fabric: Fabric, arguments: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step of each model and of fetching its cases: the least of the repeats.

    The models take turns, so that whatever else the machine does meets them all.
    """
    task, runs = random_task(*SETS[name]), {}
    for model in MODELS:
        recipe = find_recipe(f"uea/{name}", model, protocol)
        recipe = recipe.with_settings([f"precision={arguments.precision}"])
        runs[model] = Run(recipe, task, fabric, None, Watcher(), Saving(math.inf, math.inf))
        runs[model].model.train()
    indices = next(runs[MODELS[0]].plan.batches(0, fabric.device))
    times: dict[str, list[tuple[float, float]]] = {model: [] for model in MODELS}
    for _ in range(WARM_UP + arguments.repeats):
        for model, run in runs.items():
            step = timed(partial(run.step, indices, run.recipe.optim.lr))
            fetch = timed(partial(run.task.train.__getitem__, indices))
            times[model].append((step, fetch))
    return {
        model: (min(step for step, _ in each[WARM_UP:]), min(fetch for _, fetch in each[WARM_UP:]))
        for model, each in times.items()
    }


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of one call; on a GPU the mean of 20 without synchronising, as in training."""
    calls = 20 if torch.cuda.is_available() else 1
    synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize()
    return 1e3 * (time.perf_counter() - began) / calls


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write(rows: list[dict[str, object]], folder: Path) -> None:
    card = str(rows[0]["device"]).lower().replace("nvidia ", "").replace(" ", "_")
    machine = card if card != "cpu" else f"cpu_{platform.machine()}_{rows[0]['threads']}threads"
    path = folder / f"epoch_{machine}_torch{torch.__version__.split('+')[0]}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
