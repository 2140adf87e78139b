"""Windows of trajectories, the cases of a Decision Transformer.

Letters: B cases, K steps of a window, T transitions, S numbers of a state, A of an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.offline_rl.environments import environment_of
from primal_attention.tasks.offline_rl.sets import load_rl
from primal_attention.tasks.offline_rl.trajectories import Trajectories
from primal_attention.tasks.task import Batch, Cases, Goal, Sizes, Task

RETURN_SCALE = 1000.0
TOKENS_PER_STEP = 3  # return-to-go, state, action


@dataclass(frozen=True)
class Windows(Cases):
    """A case for every transition: it and those after it, K in all, in the same episode.

    ``inputs`` hold the transitions one after the other. A window that the end of the episode cuts
    short is padded with zeros on the right; its mask is false, and its target NaN, there.
    """

    context: int = 20  # K

    def __getitem__(self, indices: Tensor) -> Batch:
        """Cut the windows that begin with those transitions."""
        steps = indices[:, None] + torch.arange(self.context, device=indices.device)
        last = self.inputs["last"][indices][:, None]
        padding, steps = steps > last, torch.minimum(steps, last)
        inputs = {
            name: each[steps].masked_fill(padding if each.ndim == 1 else padding[..., None], 0)
            for name, each in self.inputs.items()
            if name != "last"
        }
        target = self.target[steps].masked_fill(padding[..., None], torch.nan)
        return Batch({**inputs, "token_mask": ~padding}, target)

    def joined(self, other: Cases) -> Cases:
        """Append the other windows."""
        moved = {**other.inputs, "last": other.inputs["last"] + len(self)}
        return super().joined(replace(other, inputs=moved))


@dataclass(frozen=True, eq=False)
class TrajectoryEncoding:
    """Turns states and returns into inputs; fitted on the training episodes."""

    mean: NDArray[np.float64]  # [S]
    std: NDArray[np.float64]  # [S]
    return_scale: float = RETURN_SCALE

    @classmethod
    def fit(cls, found: Trajectories) -> TrajectoryEncoding:
        """Compute mean and standard deviation of each number of a state; 1 for a constant."""
        states = found.states.astype(np.float64)
        std = states.std(axis=0)
        return cls(states.mean(axis=0), np.where(std > 1e-6, std, 1.0))

    def states(self, states: NDArray[Any]) -> Tensor:
        """Standardise states [..., S]."""
        standardised = (np.asarray(states, np.float64) - self.mean) / self.std
        return torch.from_numpy(standardised.astype(np.float32))

    def encode(self, found: Trajectories) -> dict[str, Tensor]:
        """Convert transitions to what ``Windows`` holds."""
        returns = found.returns_to_go() / self.return_scale
        last = np.repeat(np.cumsum(found.lengths) - 1, found.lengths)
        return {
            "states": self.states(found.states),
            "actions": torch.from_numpy(found.actions.astype(np.float32)),
            "returns_to_go": torch.from_numpy(returns.astype(np.float32)[:, None]),
            "timesteps": torch.from_numpy(found.timesteps()),
            "last": torch.from_numpy(last),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for a checkpoint."""
        numbers = {"mean": self.mean.tolist(), "std": self.std.tolist()}
        return {**numbers, "return_scale": self.return_scale}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrajectoryEncoding:
        """Restore what ``to_dict`` described."""
        mean, std = (np.asarray(values[key], np.float64) for key in ("mean", "std"))
        return cls(mean, std, float(values["return_scale"]))


def _errors(outputs: Tensor, target: Tensor) -> Tensor:
    """The squared errors of actions, a mean over real steps, times the part that is real."""
    return (outputs - target).masked_fill(target.isnan(), 0).square().mean(dim=(1, 2))


ACTIONS = Goal(
    _errors,
    _errors,
    "action_mse",
    lambda mean: mean,
    higher_is_better=False,
    weights=lambda target: (~target[..., 0].isnan()).double().mean(dim=1),  # the real part
)


def rl_task(
    name: str, *, folder: Path | None = None, context: int = 20, valid: float = 0.05, seed: int
) -> Task:
    """Make a task of a set: actions from returns-to-go, states and the actions before.

    The error of the actions is measured on whole episodes that are held out; what counts in the
    end is the return in the environment, see ``roll_out``.

    Args:
        name: One of ``RL_SETS``.
        folder: Of its data, see ``load_rl``.
        context: Steps K of a window.
        valid: The fraction of the episodes that is held out, one at least.
        seed: Of which these are.
    """
    if not 0 < valid < 1:
        raise ValueError(f"valid must be in (0, 1), got {valid}")
    if context < 1:
        raise ValueError(f"context must be at least 1 step, got {context}")
    found, environment = load_rl(name, folder), environment_of(name)
    if len(found) < 2:
        raise ValueError(f"{name} has one episode; at least one to train on and one to hold out")
    order = np.random.default_rng(seed).permutation(len(found))
    held_out = min(max(1, round(valid * len(found))), len(found) - 1)
    kept, rest = found.episodes(order[held_out:]), found.episodes(order[:held_out])
    encoding = TrajectoryEncoding.fit(kept)
    encoded = [encoding.encode(each) for each in (kept, rest)]
    train, held = (Windows(inputs, inputs["actions"], context) for inputs in encoded)
    return Task(
        f"rl/{name}",
        ACTIONS,
        Sizes(TOKENS_PER_STEP * context, environment.action_dim, environment.state_dim),
        train=train,
        valid=held,
        test=held,
        encoding=encoding,
    )
