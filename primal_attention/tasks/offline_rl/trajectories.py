"""Trajectories: states, actions and rewards, episode after episode.

Letters: T transitions, E episodes, S numbers of a state, A of an action.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.offline_rl.environments import Environment

Numbers = NDArray[np.floating[Any]]


@dataclass(frozen=True, eq=False)
class Trajectories:
    """All episodes, one after the other."""

    states: Numbers  # [T, S]: before the action
    actions: Numbers  # [T, A]
    rewards: Numbers  # [T]
    lengths: NDArray[np.int64]  # [E]
    terminated: NDArray[np.bool_]  # [E]: ended by itself, not by the limit of time
    facts: dict[str, Any] = field(default_factory=dict)  # where it is from, for JSON

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first transition of each episode, [E]."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def returns(self) -> NDArray[np.float64]:
        """The sum of the rewards of each episode, [E]."""
        return np.add.reduceat(self.rewards.astype(np.float64), self.starts)

    def returns_to_go(self) -> NDArray[np.float64]:
        """Sum the rewards from each transition to the end of its episode, [T]."""
        rewards = self.rewards.astype(np.float64)
        so_far = np.cumsum(rewards)
        ends = np.cumsum(self.lengths) - 1
        return np.repeat(so_far[ends], self.lengths) - so_far + rewards

    def timesteps(self) -> NDArray[np.int64]:
        """Number the transitions of each episode from 0, [T]."""
        return np.arange(len(self.rewards)) - np.repeat(self.starts, self.lengths)

    def episodes(self, chosen: NDArray[np.int64]) -> Trajectories:
        """Select episodes, in that order."""
        starts = self.starts
        kept = np.concatenate([np.arange(starts[i], starts[i] + self.lengths[i]) for i in chosen])
        steps = {name: getattr(self, name)[kept] for name in ("states", "actions", "rewards")}
        lengths, terminated = self.lengths[chosen], self.terminated[chosen]
        return replace(self, **steps, lengths=lengths, terminated=terminated)


def check_trajectories(found: Trajectories, environment: Environment) -> None:
    """Raise unless they can be of that environment; call it within ``reading``."""
    if not found.lengths.size:
        raise ValueError("it has no whole episode")
    for what, dim in {"states": environment.state_dim, "actions": environment.action_dim}.items():
        values = getattr(found, what)
        if values.ndim != 2 or values.shape[1] != dim:
            raise ValueError(
                f"{what} of episode 0 have shape {values.shape[1:]}, those of "
                f"{environment.gym_name} have ({dim},)"
            )
    arrays = (found.lengths, found.states, found.actions, found.rewards, found.terminated)
    if [each.dtype.kind for each in arrays] != ["i", "f", "f", "f", "b"]:
        raise ValueError(
            "lengths are to be whole numbers, values decimal ones and the flags of episodes bool"
        )
    if found.lengths.ndim != 1 or found.terminated.shape != found.lengths.shape:
        raise ValueError(f"{found.terminated.shape} flags for {found.lengths.shape} episodes")
    longest = int(found.lengths.argmax())
    if found.lengths[longest] > environment.longest:
        raise ValueError(
            f"episode {longest} has {found.lengths[longest]} steps, more than the "
            f"{environment.longest} of {environment.gym_name}; the flag of an end is missing"
        )
    total = int(found.lengths.sum())
    sizes = {len(each) for each in arrays[1:4]}
    if found.lengths.min() < 1 or sizes != {total} or found.rewards.ndim != 1:
        raise ValueError(
            f"{sorted(sizes)} states, actions and rewards for episodes of {total} steps"
        )
    for name in ("states", "actions", "rewards"):
        finite = np.isfinite(getattr(found, name)).reshape(total, -1).all(axis=1)
        if not finite.all():
            step = int(finite.argmin())
            episode = int(np.searchsorted(np.cumsum(found.lengths), step, side="right"))
            raise ValueError(
                f"{name} of episode {episode}, step {step - found.starts[episode]}, "
                "have a value that is not finite"
            )
