"""Measure one training step on a clip of 40,000 samples, on one thread of a CPU.

    python reproduction/primal_attention/audio/measure.py

The network is that of ESC-50 in float32; the samples are noise. Seconds are those of the processor,
so that other programs do not count, and the least of three steps after a first one. Memory is the
peak of the process above its size before the first step. Each model has a process of its own.
"""

import csv
import multiprocessing as mp
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F

from primal_attention.tasks import Sizes
from primal_attention.training import build_model, find_recipe
from primal_attention.training.results import current_commit

MODELS = ("primalformer_time", "softmax")
SAMPLES, CLASSES, STEPS = 40_000, 50, 3


def main() -> None:
    with (Path(__file__).parent / "steps.csv").open("w", newline="") as file:
        writer = None
        for model in MODELS:
            with ProcessPoolExecutor(1, mp.get_context("spawn")) as pool:
                row = pool.submit(measured, model).result()
            row |= {"torch": torch.__version__, "commit": current_commit()}
            writer = writer or csv.DictWriter(file, list(row), lineterminator="\n")
            if model == MODELS[0]:
                writer.writeheader()
            writer.writerow(row)
            print(row)


def measured(name: str) -> dict[str, str]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe = find_recipe("audio/esc50-fold1", name, "clean")
    model = build_model(recipe, Sizes(SAMPLES, CLASSES, num_channels=1))
    optimizer = torch.optim.AdamW(model.parameters())
    x, target = torch.randn(1, SAMPLES, 1), torch.zeros(1, dtype=torch.int64)
    before, seconds = peak_mib(), []
    for _ in range(STEPS + 1):
        begin = time.process_time()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.process_time() - begin)
    return {
        "model": name,
        "samples": f"{SAMPLES}",
        "tokens": f"{SAMPLES // recipe.model.stride}",
        "parameters": f"{sum(each.numel() for each in model.parameters())}",
        "cpu_seconds": f"{min(seconds[1:]):.2f}",
        "peak_mib": f"{peak_mib() - before:.0f}",
    }


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
