"""Kill a training run, kill -9, at random moments, resume it, and compare with one never killed.

    python benchmarks/kill_and_resume.py [--kills 20] [--seed 0] [--model primalformer]

Each trial trains JapaneseVowels (aeon has it in its package) in a directory of its own, is killed
at a moment drawn uniformly over the length of an uninterrupted run, and is started again in a new
process. The rounds of metrics.csv must then be the same bytes, result.json the same but for the
seconds, and every tensor of both checkpoints (weights, best weights, moments of the optimiser) the
same bits. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from primal_attention.training.checkpoint import read_checkpoint

PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["lightning_fabric", "torch._dynamo", "torch.utils.tensorboard", "aeon.datasets"]


def train(directory: Path, model: str) -> None:
    from primal_attention.tasks import uea_task
    from primal_attention.training import launch, train_in
    from primal_attention.training.recipes import find_recipe

    logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    recipe = find_recipe("uea/JapaneseVowels", model, "clean")
    recipe = replace(recipe, dim=64, ffn_dim=128, epochs=30, patience=None)
    task = uea_task("JapaneseVowels", valid=0.2, seed=0)
    train_in(directory, recipe, task, launch(accelerator="cpu", devices=1), save_every=0)


def begin(directory: Path, model: str) -> BaseProcess:
    process = PROCESSES.Process(target=train, args=(directory, model))
    process.start()
    return process


def finish(directory: Path, model: str) -> float:
    """Train to the end; the seconds it took."""
    began = time.monotonic()
    process = begin(directory, model)
    process.join()
    if process.exitcode != 0:
        sys.exit(f"a run that nobody killed ended with {process.exitcode}")
    return time.monotonic() - began


def kill(directory: Path, model: str, after: float) -> tuple[int, str]:
    """Kill a new run after so many seconds; the rounds it had done, and what was half written."""
    process = begin(directory, model)
    process.join(after)
    process.kill()
    process.join()
    metrics = directory / "metrics.csv"
    rounds = len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0
    return rounds, ", ".join(path.name for path in directory.glob(".*"))


def differences(a: Path, b: Path) -> list[str]:
    """What two finished runs do not have in common."""
    found = []
    if (a / "metrics.csv").read_bytes() != (b / "metrics.csv").read_bytes():
        found.append("metrics.csv")
    results = [json.loads((run / "result.json").read_text()) | {"seconds": 0} for run in (a, b)]
    if results[0] != results[1]:
        found.append("result.json")
    for name in ("best.safetensors", "last.safetensors"):
        ours, theirs = (read_checkpoint(run / name).tensors for run in (a, b))
        same = ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
        found += [] if same else [name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="primalformer")
    options = parser.parse_args()
    PROCESSES.set_forkserver_preload(PRELOADED)
    moments, wrong = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(whole, options.model)  # the first process also waits for imports
        length = finish(Path(folder) / "again", options.model)
        result = json.loads((whole / "result.json").read_text())
        print(
            f"JapaneseVowels, {options.model}: {len(result['rounds'])} epochs in {length:.1f} s, "
            f"{result['metric']} {result['value']:.2f}; run again: "
            f"{', '.join(differences(whole, Path(folder) / 'again')) or 'the same'}"
        )
        print("trial  killed after  epochs done  half written                        resumed")
        for trial in range(1, options.kills + 1):
            directory = Path(folder) / str(trial)
            after = moments.uniform(0, length)
            rounds, left = kill(directory, options.model, after)
            finish(directory, options.model)
            found = differences(whole, directory)
            wrong += bool(found)
            verdict = f"differs: {', '.join(found)}" if found else "the same"
            print(f"{trial:5d}  {after:10.2f} s  {rounds:11d}  {left:34s}  {verdict}", flush=True)
    print(f"{options.kills - wrong} of {options.kills} resumed runs equal the uninterrupted one")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
