"""Baselines beside Table 4: the data's own scores, and behaviour cloning on all or the best of it.

    python reproduction/primal_attention/table4_d4rl/baselines.py --data data/rl

Behaviour cloning is a network of two hidden layers from the state to the action: it asks for no
return and remembers nothing. ``bc10`` learns from the tenth of the episodes that earned most.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from primal_attention.atomic_files import write_rows
from primal_attention.tasks.offline_rl import (
    RL_SETS,
    Trajectories,
    TrajectoryEncoding,
    Trial,
    environment_of,
    load_rl,
    roll_out,
)
from primal_attention.training.results import current_commit, estimate

HERE = Path(__file__).parent
WIDTH, STEPS, BATCH, LR = 256, 20_000, 256, 3e-4
METHODS = {"bc": 1.0, "bc10": 0.1}  # the part of the episodes that is learned from
COLUMNS = (
    *("dataset", "method", "seed", "score", "margin", "episodes", "steps"),
    *("device", "torch", "commit"),
)


class Cloned(nn.Module):
    """A policy by the state alone."""

    def __init__(self, state_dim: int, action_dim: int):
        super().__init__()
        self.network = nn.Sequential(
            nn.Linear(state_dim, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, action_dim),
            nn.Tanh(),
        )

    @torch.no_grad()
    def act(self, states: Tensor, returns_to_go: Tensor) -> Tensor:
        """The actions in standardised states."""
        found: Tensor = self.network(states)
        return found

    def keep(self, kept: Tensor) -> None:
        """There is nothing to forget."""


def clone(found: Trajectories, encoding: TrajectoryEncoding, steps: int, seed: int) -> Cloned:
    torch.manual_seed(seed)
    inputs = encoding.encode(found)
    states, actions = inputs["states"], inputs["actions"]
    policy = Cloned(states.shape[1], actions.shape[1])
    optimizer = torch.optim.Adam(policy.parameters(), LR)
    for _ in range(steps):
        chosen = torch.randint(len(states), (BATCH,))
        loss = (policy.network(states[chosen]) - actions[chosen]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def best(found: Trajectories, part: float) -> Trajectories:
    """The episodes with the highest returns."""
    order = np.argsort(found.returns)[::-1]
    return found.episodes(order[: max(1, round(part * len(found)))])


def rows_of(name: str, arguments: argparse.Namespace) -> list[list[str]]:
    environment, found = environment_of(name), load_rl(name, arguments.data)
    scores = {("data", ""): environment.score(found.returns)}
    for method, part in METHODS.items():
        for seed in range(arguments.seeds):
            chosen = best(found, part)
            encoding = TrajectoryEncoding.fit(chosen)
            policy = clone(chosen, encoding, arguments.steps, seed)
            trial = Trial(environment.targets[0], arguments.episodes, seed=100)
            rollout = roll_out(policy, encoding, environment, trial)
            scores[method, str(seed)] = environment.score(rollout.returns)
    rows = []
    for (method, seed), each in scores.items():
        mean, margin, *_ = estimate(each.tolist())
        steps = "" if method == "data" else str(arguments.steps)
        cells = [name, method, seed, f"{mean:.4f}", f"{margin:.4f}", str(len(each)), steps]
        rows.append([*cells, "cpu", torch.__version__, current_commit()])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=RL_SETS, help="sets, default: all")
    parser.add_argument("--data", type=Path, help="folder of the sets")
    parser.add_argument("--out", type=Path, default=HERE / "baselines.csv")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--episodes", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.names:
        for row in rows_of(name, arguments):
            rows.append(dict(zip(COLUMNS, row, strict=True)))
            print(*row, flush=True)
        write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
