"""Trajectories: states, actions and rewards, episode after episode.

Letters: T transitions, E episodes, S numbers of a state, A of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    final_states: Numbers | None = None  # [E, S]: after the last action, where they are kept
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
        final = None if self.final_states is None else self.final_states[chosen]
        return Trajectories(
            self.states[kept],
            self.actions[kept],
            self.rewards[kept],
            self.lengths[chosen],
            self.terminated[chosen],
            final,
            self.facts,
        )


def joined(parts: Sequence[Trajectories], facts: dict[str, Any] | None = None) -> Trajectories:
    """Join the episodes of several, one after the other."""
    names = ("states", "actions", "rewards", "lengths", "terminated")
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in names
    }
    final = [part.final_states for part in parts if part.final_states is not None]
    kept = np.concatenate(final) if len(final) == len(parts) else None
    return Trajectories(**arrays, final_states=kept, facts=facts or {})


def check_trajectories(found: Trajectories, environment: Environment, place: object) -> None:
    """Raise where they cannot be of that environment; names the file and the episode."""
    if not found.lengths.size:
        raise ValueError(f"{place} has no whole episode")
    dims = {"states": environment.state_dim, "actions": environment.action_dim}
    for what, dim in dims.items():
        values = getattr(found, what)
        if values.ndim != 2 or values.shape[1] != dim:
            raise ValueError(
                f"{place}: {what} of episode 0 have shape {values.shape[1:]}, those of "
                f"{environment.gym_name} have ({dim},)"
            )
    arrays = (found.lengths, found.states, found.actions, found.rewards)
    if [each.dtype.kind for each in arrays] != ["i", "f", "f", "f"]:
        raise ValueError(f"{place}: lengths are to be whole numbers, and the values decimal ones")
    if found.lengths.ndim != 1 or found.terminated.shape != found.lengths.shape:
        raise ValueError(
            f"{place}: {found.terminated.shape} flags for {found.lengths.shape} episodes"
        )
    if found.terminated.dtype != np.bool_:
        raise ValueError(f"{place}: the flags of its episodes are {found.terminated.dtype}")
    longest = int(found.lengths.argmax())
    if found.lengths[longest] > environment.longest:
        raise ValueError(
            f"{place}: episode {longest} has {found.lengths[longest]} steps, more than the "
            f"{environment.longest} of {environment.gym_name}; the flag of an end is missing"
        )
    total = int(found.lengths.sum())
    sizes = {len(each) for each in arrays[1:]}
    if found.lengths.min() < 1 or sizes != {total} or found.rewards.ndim != 1:
        raise ValueError(
            f"{place}: {sorted(sizes)} states, actions and rewards for episodes of {total} steps"
        )
    _check_finite(found, place)


def _check_finite(found: Trajectories, place: object) -> None:
    for name in ("states", "actions", "rewards"):
        values = getattr(found, name)
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            step = int(bad.argmax())
            episode = int(np.searchsorted(np.cumsum(found.lengths), step, side="right"))
            raise ValueError(
                f"{place}: {name} of episode {episode}, step {step - found.starts[episode]}, "
                "have a value that is not finite"
            )
