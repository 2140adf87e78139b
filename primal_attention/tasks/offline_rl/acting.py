"""How a trained model acts: on a window of the past, or on all of it.

By window, as in the papers, the model reads the last K steps anew at every step. By state it reads
the new step alone and remembers all that came before; where every layer is patched, the cost of an
action then does not grow with the episode. Both agree for the first K steps; after that they are
different policies: one forgets, the other does not.

Letters: B episodes, K steps of a window, S numbers of a state, A of an action.
"""

from typing import Protocol

import torch
from torch import Tensor

from primal_attention.models.decision_transformer import DecisionModel, keep_episodes

MODES = ("window", "state")


class Policy(Protocol):
    """Acts in several episodes at once, all at the same step. Tensors are those of the CPU."""

    def act(self, states: Tensor, returns_to_go: Tensor) -> Tensor:
        """The actions [B, A] in standardised states [B, S], with scaled returns to go [B, 1]."""

    def keep(self, kept: Tensor) -> None:
        """Go on with some of the episodes alone, by their indices."""


class StatePolicy:
    """Remembers all of the past, where the model is."""

    def __init__(self, model: DecisionModel):
        self.model, self.past = model, model.begin()
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def act(self, states: Tensor, returns_to_go: Tensor) -> Tensor:
        """The next actions."""
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
        """The next actions."""
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
    """A policy at the beginning of episodes, in one of ``MODES``."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return StatePolicy(model) if mode == "state" else WindowPolicy(model, context)
