"""The processor time of an action at some steps of an episode, by window and by state, on one core.

    python reproduction/primal_attention/table4_d4rl/action_time.py --episodes 1

Time of the processor, not of the clock: others may be using the machine. Rows go to a csv file.
"""

import argparse
import statistics
import time
from itertools import product
from pathlib import Path

import torch

from primal_attention.atomic_files import write_rows
from primal_attention.tasks import Sizes
from primal_attention.tasks.offline_rl import policy_of
from primal_attention.training import build_model, find_recipe
from primal_attention.training.results import current_commit

HERE = Path(__file__).parent
MODELS = ("softmax", "primal_plus", "primalformer", "linear", "flow")
MARKS, AROUND, CONTEXT = (20, 100, 300, 999), 20, 20
COLUMNS = ("model", "mode", "episodes", *(f"step_{mark}_ms" for mark in MARKS), "torch", "commit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=1, help="side by side")
    parser.add_argument("--repeats", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--out", type=Path, default=HERE / "action_time.csv")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model, mode in product(MODELS, ("window", "state")):
        row = [model, mode, arguments.episodes, *fastest(model, mode, arguments)]
        made = [*row, torch.__version__, current_commit()]
        rows.append(dict(zip(COLUMNS, made, strict=True)))
        print(*row, flush=True)
    write_rows(arguments.out, rows)


def fastest(model: str, mode: str, arguments: argparse.Namespace) -> list[str]:
    """Milliseconds at the marks."""
    times = [times_of(model, mode, arguments.episodes) for _ in range(arguments.repeats)]
    return [f"{1e3 * min(each):.2f}" for each in zip(*times, strict=True)]


def times_of(model: str, mode: str, episodes: int) -> list[float]:
    """Medians around the marks, in seconds."""
    recipe = find_recipe("rl/hopper-medium", model, "clean")
    policy = policy_of(build_model(recipe, Sizes(3 * CONTEXT, 3, 11)).eval(), mode, CONTEXT)
    states, returns = torch.randn(episodes, 11), torch.ones(episodes, 1)
    times = []
    for _ in range(MARKS[-1]):
        began = time.process_time()
        policy.act(states, returns)
        times.append(time.process_time() - began)
    return [statistics.median(times[mark - AROUND : mark]) for mark in MARKS]


if __name__ == "__main__":
    main()
