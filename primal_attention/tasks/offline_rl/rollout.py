"""What counts: the return of a policy in the environment.

Letters: B episodes that are not over.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.tasks.offline_rl.acting import Policy
from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.simulators import make_environment, package
from primal_attention.tasks.offline_rl.windows import TrajectoryEncoding

_EVERY, _FRAME_MS = 4, 32  # of a video: one picture in so many steps, shown so long


class Trial(NamedTuple):
    """How a policy is tried."""

    target: float  # the return to ask for; what was earned is taken off it on the way
    episodes: int = 10
    seed: int = 0  # of the first episode; the others count on
    version: int = 5  # or 4, of the environment


class Rollout(NamedTuple):
    """What came of the episodes."""

    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]


def roll_out(
    policy: Policy,
    encoding: TrajectoryEncoding,
    environment: Environment,
    trial: Trial,
    *,
    told: Callable[[int], None] = lambda step: None,
    video: Path | None = None,
) -> Rollout:
    """Episodes side by side, each with a seed of its own; one that is over is left out.

    Args:
        policy: At the beginning of as many episodes.
        encoding: Of the data that it learned from.
        environment: Where to act.
        trial: How many of them, and the return to ask for.
        told: Is called with the number of each step.
        video: A `.gif` of the first episode, where one is wanted.
    """
    target, episodes, seed, version = trial
    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}")
    camera = {} if video is None else {"render_mode": "rgb_array"}
    simulators = [
        make_environment(environment, version, **({} if index else camera))
        for index in range(episodes)
    ]
    states = np.stack([each.reset(seed=seed + i)[0] for i, each in enumerate(simulators)])
    returns, lengths = np.zeros(episodes), np.zeros(episodes, dtype=np.int64)
    alive, frames = np.arange(episodes), list[Any]()
    while len(alive):
        step = int(lengths.max())
        told(step)
        if video is not None and alive[0] == 0 and step % _EVERY == 0:
            frames.append(simulators[0].render())
        left = torch.from_numpy((target - returns[alive]) / encoding.return_scale)
        actions = policy.act(encoding.states(states), left.float()[:, None]).clamp(-1, 1)
        steps = [
            simulators[i].step(action) for i, action in zip(alive, actions.numpy(), strict=True)
        ]
        lengths[alive] += 1
        returns[alive] += [each[1] for each in steps]
        kept = np.flatnonzero([not (each[2] or each[3]) for each in steps])
        states = np.array([steps[i][0] for i in kept])
        if len(kept) < len(alive):
            policy.keep(torch.from_numpy(kept))
        alive = alive[kept]
    for each in simulators:
        each.close()
    if video is not None:
        _write_video(video, frames)
    return Rollout(returns, lengths)


def _write_video(path: Path, frames: list[Any]) -> None:
    image = package("PIL.Image")
    first, *others = [image.fromarray(frame) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    incoming = path.with_name(f".{path.name}")
    first.save(
        incoming, format="GIF", save_all=True, append_images=others, duration=_FRAME_MS, loop=0
    )
    incoming.replace(path)
