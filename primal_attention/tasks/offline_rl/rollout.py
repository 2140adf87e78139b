"""Act in an environment with a trained model, and measure its return.

By window, as in the papers, the model reads the last K steps anew at every step. By state it reads
the new step alone and remembers all that came before; where every layer is patched, the cost of an
action then does not grow with the episode. Both agree for the first K steps; after that they are
different policies: one forgets, the other does not.

Letters: B episodes that are not over, K steps of a window, S numbers of a state, A of an action.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.models.decision_transformer import DecisionModel, keep_episodes
from primal_attention.tasks.offline_rl.environments import Environment, make_environment, package
from primal_attention.tasks.offline_rl.windows import TrajectoryEncoding

MODES = ("window", "state")
_EVERY, _FRAME_MS = 4, 32  # of a video: one picture in so many steps, shown so long


class Policy(Protocol):
    """Acts in several episodes at once, all at the same step; takes and gives CPU tensors."""

    def act(self, states: Tensor, returns_to_go: Tensor) -> Tensor:
        """Choose actions [B, A] in standardised states [B, S], with scaled returns to go [B, 1]."""

    def keep(self, kept: Tensor) -> None:
        """Go on with only some of the episodes, by their indices."""


class StatePolicy:
    """Remembers all of the past, where the model is."""

    def __init__(self, model: DecisionModel):
        self.model, self.past = model, model.begin()
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def act(self, states: Tensor, returns_to_go: Tensor) -> Tensor:
        """Return the next actions."""
        inputs = states.to(self.device), returns_to_go.to(self.device)
        action, self.past = self.model.act(*inputs, self.past)
        return action.cpu()

    def keep(self, kept: Tensor) -> None:
        """Forget the other episodes."""
        self.past = keep_episodes(self.past, kept.to(self.device))


class WindowPolicy:
    """Reads the last K steps, which are kept where the model is."""

    def __init__(self, model: DecisionModel, context: int):
        self.model, self.context, self.step = model, context, 0
        self.device = next(model.parameters()).device
        self.window: dict[str, Tensor] = {}

    @torch.no_grad()
    def act(self, states: Tensor, returns_to_go: Tensor) -> Tensor:
        """Return the next actions."""
        states, returns_to_go = states.to(self.device), returns_to_go.to(self.device)
        nothing = states.new_zeros(len(states), self.model.action_dim)
        self._append("states", states)
        self._append("returns_to_go", returns_to_go)
        self._append("actions", nothing)  # of this step; it does not bear on the output
        steps = torch.arange(max(0, self.step + 1 - self.context), self.step + 1)
        timesteps = steps.to(self.device).expand(len(states), -1)
        action: Tensor = self.model(**self.window, timesteps=timesteps)[:, -1]
        self.window["actions"][:, -1] = action
        self.step += 1
        return action.cpu()

    def _append(self, name: str, values: Tensor) -> None:
        before = self.window.get(name, values[:, None][:, :0])
        self.window[name] = torch.cat([before, values[:, None]], dim=1)[:, -self.context :]

    def keep(self, kept: Tensor) -> None:
        """Forget the other episodes."""
        kept = kept.to(self.device)
        self.window = {name: each[kept] for name, each in self.window.items()}


def policy_of(model: DecisionModel, mode: str, context: int) -> Policy:
    """Make a policy, in one of ``MODES``, at the beginning of episodes."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return StatePolicy(model) if mode == "state" else WindowPolicy(model, context)


class Trial(NamedTuple):
    """Settings of a roll-out."""

    target: float  # the return to ask for; what was earned is taken off it on the way
    episodes: int = 10
    seed: int = 0  # of the first episode; the others count on
    version: int = 5  # or 4, of the environment


class Rollout(NamedTuple):
    """Returns and lengths of the episodes."""

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
    """Act in episodes side by side, each with a seed of its own; one that is over is left out.

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
