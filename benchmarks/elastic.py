"""Kill random processes of a run under torchrun; it must end with the numbers of one left alone.

    python benchmarks/elastic.py [--kills 10] [--processes 2] [--context 2] [--strategy ddp]

Processes that torchrun starts anew go on from the last checkpoint.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from primal_attention.tasks import CLASSIFICATION, Cases, Sizes, Task
from primal_attention.training import Recipe, finish, launch, read_outcome, train_in
from primal_attention.training.context import context_mesh

EPOCHS = 40
RECIPE = Recipe(
    "toy/toy", "primalformer", dim=8, num_heads=2, ffn_dim=16, epochs=EPOCHS, eta=0.1,
    dropout=0.1, attention={"num_directions": 3},
)  # fmt: skip


def toy_task() -> Task:
    """Sequences of noise about the number of their class."""
    generator = torch.Generator().manual_seed(0)

    def cases(number: int) -> Cases:
        target = torch.randint(3, (number,), generator=generator)
        x = torch.randn(number, 11, 5, generator=generator) + target[:, None, None]
        lengths = torch.randint(3, 12, (number, 1), generator=generator)
        return Cases({"x": x, "token_mask": torch.arange(11) < lengths}, target)

    sets = [cases(number) for number in (48, 32, 32)]
    return Task("toy", CLASSIFICATION, Sizes(11, 3, num_channels=5), *sets)


def work(directory: Path, processes: int, context: int, strategy: str) -> None:
    """Train as one of the processes of torchrun."""
    (directory / "pids").mkdir(parents=True, exist_ok=True)
    (directory / "pids" / str(os.getpid())).touch()
    torch.set_num_threads(1)
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    fabric = launch(accelerator="cpu", devices=processes, num_nodes=nodes, strategy=strategy)
    mesh = context_mesh(fabric, context)
    train_in(directory / "run", RECIPE, toy_task(), fabric, context=mesh, save_every=0)
    finish(fabric)


def rounds(directory: Path) -> int:
    """Count the rounds that are done."""
    path = directory / "run" / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


def run(directory: Path, options: argparse.Namespace, kills: int) -> list[int]:
    """Run under torchrun and kill a process so many times; return the rounds of the kills."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(options.processes), "--max_restarts", str(kills)]
    command += ["--monitor_interval", "0.2", __file__, "--worker", str(directory)]
    command += ["--context", str(options.context), "--strategy", options.strategy]
    # Else processes that begin anew find addresses of the earlier ones, and fail once more.
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command += ["--processes", str(options.processes)]
    torchrun = subprocess.Popen(command, env=environment)
    chance, killed = random.Random(options.seed), []
    while len(killed) < kills:
        before = rounds(directory)
        while rounds(directory) <= before:
            time.sleep(0.01)
            if torchrun.poll() is not None:
                raise SystemExit(f"torchrun ended after {len(killed)} kills")
        time.sleep(chance.uniform(0, 0.2))
        alive = [int(path.name) for path in (directory / "pids").iterdir()]
        alive = [pid for pid in alive if Path(f"/proc/{pid}").exists()]
        if not alive:
            continue
        victim = chance.choice(alive)
        os.kill(victim, signal.SIGKILL)
        killed.append(rounds(directory))
        for path in (directory / "pids").iterdir():
            path.unlink()
    if torchrun.wait():
        raise SystemExit(f"torchrun ended with {torchrun.returncode}")
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--context", type=int, default=2)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.processes, options.context, options.strategy)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        run(whole, options, 0)
        at = run(killed, options, options.kills)
        ours, theirs = (read_outcome(each / "run") for each in (killed, whole))
        off = max(
            abs(a[key] - b[key])
            for a, b in zip(ours.rounds, theirs.rounds, strict=True)
            for key in b
        )
        weights = (ours.weights[key] - theirs.weights[key] for key in theirs.weights)
        found = {
            "killed after rounds": at,
            "metric": [ours.value, theirs.value],
            "largest difference of a round": off,
            "of the weights": max(each.abs().max().item() for each in weights),
        }
        print(json.dumps(found))
        if ours.value != theirs.value or off > 1e-3:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
