"""Kill `primal train`, kill -9, at random moments, let it go on, and compare with one never killed.

    python tests/fuzz/kills.py [--kills 20] [--a-run 4] [--seed 0] [--model primalformer]

Each run trains JapaneseVowels (aeon has it in its package) with the KSVD objective, and then anew
on the validation cases too. It is killed up to --a-run times, each time at a moment drawn uniformly
over the length of an uninterrupted run, and started again in a new process. A process that ended
before its moment counts as no kill and ends the run. Then the rounds of
metrics.csv must be the same bytes, result.json and results.csv the same but for the seconds, and
every tensor of all checkpoints (weights, best weights, moments of the optimiser) the same bits.
Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from primal_attention.training.checkpoint import read_checkpoint

PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["primal_attention.cli.train", "lightning_fabric", "torch._dynamo", "aeon.datasets"]
SETTINGS = (
    *("dim=16", "num_heads=2", "ffn_dim=16", "attention.num_directions=5", "batch_size=64"),
    *("epochs=10", "patience=none", "refit=true", "eta=0.1"),
)


def train(out: Path, model: str) -> None:
    """The command, in this process."""
    from primal_attention import cli

    torch.set_num_threads(1)
    sets = [part for setting in SETTINGS for part in ("--set", setting)]
    command = ["train", "uea/JapaneseVowels", "--model", model, *sets, "--out", str(out)]
    sys.argv = ["primal", *command, "--save-every", "0", "--accelerator", "cpu", "--quiet"]
    cli.main()


def begin(out: Path, model: str) -> BaseProcess:
    process = PROCESSES.Process(target=train, args=(out, model))
    process.start()
    return process


def finish(out: Path, model: str) -> float:
    """Train to the end; the seconds it took."""
    began = time.monotonic()
    process = begin(out, model)
    process.join()
    if process.exitcode != 0:
        sys.exit(f"a run that nobody killed ended with {process.exitcode}")
    return time.monotonic() - began


def kill(out: Path, model: str, after: float) -> str | None:
    """Kill a run after so many seconds; how far it was, or None where it had ended."""
    process = begin(out, model)
    process.join(after)
    process.kill()
    process.join()
    if process.exitcode == 0:
        return None
    if process.exitcode != -signal.SIGKILL:
        sys.exit(f"a run ended by itself with {process.exitcode}")
    rounds = [len(path.read_text().splitlines()) - 1 for path in out.rglob("metrics.csv")]
    half_written = [path.name for path in out.rglob(".*.unfinished")]
    refit = " and refitted" if list(out.rglob("refit/last.safetensors")) else ""
    return f"{sum(rounds)} rounds{refit}" + "".join(f", {name}" for name in half_written)


def differences(a: Path, b: Path) -> list[str]:
    """What two finished runs do not have in common; no file of either is missing in the other."""
    names = [{str(path.relative_to(out)) for path in files_of(out)} for out in (a, b)]
    found = sorted(names[0] ^ names[1])
    for name in sorted(names[0] & names[1]):
        if read(a / name) != read(b / name):
            found.append(name)
    return found


def files_of(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file() and "tfevents" not in path.name]


def read(path: Path) -> object:
    """What is in a file, without what a clock said."""
    if path.suffix == ".safetensors":
        tensors, facts = read_checkpoint(path)
        facts.get("progress", {}).pop("seconds", None)
        bits = {name: (each.dtype, each.shape, raw(each)) for name, each in tensors.items()}
        return bits, facts
    if path.name == "results.csv":
        with path.open(newline="") as file:
            return [row | {"seconds": ""} for row in csv.DictReader(file)]
    if path.name == "result.json":
        return json.loads(path.read_text()) | {"seconds": 0}
    return path.read_bytes()


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--a-run", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="primalformer")
    options = parser.parse_args()
    PROCESSES.set_forkserver_preload(PRELOADED)
    moments, done, runs, wrong = random.Random(options.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        finish(whole, options.model)  # the first process also waits for imports
        length = finish(Path(folder) / "again", options.model)
        found = differences(whole, Path(folder) / "again")
        print(f"not killed: {length:.1f} s; run again: {', '.join(found) or 'the same'}")
        while done < options.kills:
            runs += 1
            out = Path(folder) / str(runs)
            for _ in range(min(options.a_run, options.kills - done)):
                after = moments.uniform(0, length)
                reached = kill(out, options.model, after)
                if reached is None:
                    break
                done += 1
                print(f"kill {done} after {after:.2f} s: {reached}")
            finish(out, options.model)
            found = differences(whole, out)
            wrong += bool(found)
            print(f"  ended: {', '.join(found) or 'the same'}", flush=True)
    print(f"{done} kills of {runs} runs, {wrong} of which differ from the uninterrupted one")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
