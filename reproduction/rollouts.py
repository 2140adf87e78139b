"""Roll out the policies of runs, several at a time, and add their rows to a results.csv.

    python reproduction/rollouts.py runs/table4 --jobs 2 --results table4/results.csv

Looks for run directories everywhere in the folders given. Policies that have a row are skipped. It
needs gymnasium and mujoco, but not the data; with --accelerator cuda the models act on a GPU, which
is about ten times as fast.
"""

import argparse
import multiprocessing as mp
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from primal_attention.tasks.offline_rl import Trial, environment_of
from primal_attention.training.checkpoint import BEST
from primal_attention.training.results import Row, add_rows, current_commit, read_rows
from primal_attention.training.rollouts import missing_rows, read_policies


def main() -> None:
    arguments = parse_arguments()
    places = [place for folder in arguments.folders for place in runs_in(folder)]
    print(f"{len(places)} runs", flush=True)
    rows = read_rows(arguments.results)
    settings = (arguments.episodes, arguments.target, arguments.mode, arguments.seed)
    device = arguments.accelerator
    with ProcessPoolExecutor(arguments.jobs, mp.get_context("spawn")) as pool:
        commit = current_commit()
        futures = [pool.submit(rows_of, place, *settings, rows, commit, device) for place in places]
        for future in as_completed(futures):
            for row in future.result():
                add_rows(arguments.results, [row])
                print(" ".join(row[name] for name in TOLD), flush=True)


TOLD = ("dataset", "model", "protocol", "seed", "selection", "value", "margin", "return", "length")


def runs_in(folder: Path) -> list[Path]:
    """Run directories."""
    return sorted(path.parent for path in folder.rglob(BEST))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, help="where runs are")
    parser.add_argument("--results", type=Path, required=True, help="the file to add to")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--episodes", type=int, default=10, help="of each policy")
    parser.add_argument("--target", type=float, help="return to ask for")
    parser.add_argument("--mode", default="window", choices=("window", "state"))
    parser.add_argument("--seed", type=int, default=100, help="of the first episode")
    parser.add_argument(
        "--accelerator", default="cpu", choices=("cpu", "cuda"), help="where models act"
    )
    return parser.parse_args()


def rows_of(
    place: Path,
    episodes: int,
    target: float | None,
    mode: str,
    seed: int,
    rows: list[Row],
    commit: str,
    device: str,
) -> list[Row]:
    """The rows of a run, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    found = read_policies(place)
    goal = environment_of(found.recipe.set_name).targets[0] if target is None else target
    trial = Trial(goal, episodes, seed)
    return list(missing_rows(found, trial, mode, rows, commit=commit, device=device))


if __name__ == "__main__":
    main()
