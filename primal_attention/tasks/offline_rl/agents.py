"""Trained policies, plain networks in `.npz` files, that data are made with.

A file holds linear layers ``w0``, ``b0``, ``w1``, ... with ``activation`` between them, how a
random action is drawn (``noise``), how the action is bounded (``squash``), and how observations
are normalised.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays
from primal_attention.foreign_files import reading
from primal_attention.tasks.offline_rl.environments import Environment

SAMPLED = "sampled"


class Agent:
    """A policy of one environment.

    Args:
        path: Of the file.
        environment: Which it must fit.
    """

    def __init__(self, path: Path, environment: Environment):
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"there is no policy {path}")
        with reading(path, f"a policy of {environment.gym_name}", "get the whole file anew"):
            arrays = _read(path)
            self.arrays = arrays
            layers = range(int(arrays["n_layers"]))
            self.layers = [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in layers]
            dims = int(arrays["obs_dim"]) - int(arrays["time_feature"]), int(arrays["act_dim"])
            if dims != (environment.state_dim, environment.action_dim):
                raise ValueError(f"it has states and actions of {dims}")
            self.is_relu = str(arrays["activation"]) == "relu"
            self.squashes = str(arrays["squash"]) == "tanh"
            self._try()

    def act(
        self,
        observation: NDArray[np.float64],
        step: int,
        rng: np.random.Generator,
        noise: float | str,
    ) -> NDArray[np.float32]:
        """An action in [-1, 1].

        Args:
            observation: As the environment gave it.
            step: Its number in the episode, from 0.
            rng: Of the noise.
            noise: ``"sampled"`` as the policy was trained, or the size of normal noise that is
                added to the action it prefers.
        """
        hidden, mean = self._forward(self._input(observation, step))
        if noise == SAMPLED:
            mean = mean + self._spread(hidden) * rng.standard_normal(mean.shape)
        action = np.tanh(mean) if self.squashes else mean
        if not isinstance(noise, str):
            action = action + noise * rng.standard_normal(action.shape)
        return np.clip(action, -1, 1).astype(np.float32)

    def _try(self) -> None:
        """Act once, so that arrays that do not fit each other are found now."""
        state = np.zeros(int(self.arrays["obs_dim"]) - int(self.arrays["time_feature"]))
        spread = str(self.arrays["noise"]) in ("constant", "state-dependent")
        with np.errstate(all="ignore"):  # told below
            action = self.act(state, 0, np.random.default_rng(0), SAMPLED if spread else 0.0)
        if action.shape != (int(self.arrays["act_dim"]),) or not np.isfinite(action).all():
            raise ValueError(f"its action in the state 0 is {str(action)[:60]}")

    def _input(self, observation: NDArray[np.float64], step: int) -> NDArray[np.float32]:
        arrays, x = self.arrays, np.asarray(observation, np.float64)
        if arrays["time_feature"]:
            x = np.append(x, 1 - step / arrays["time_limit"])
        if arrays["normalise_obs"]:
            x = (x - arrays["obs_mean"]) / np.sqrt(arrays["obs_var"] + arrays["obs_eps"])
            x = np.clip(x, -arrays["obs_clip"], arrays["obs_clip"])
        return x.astype(np.float32)

    def _forward(self, x: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The last hidden vector, and the mean of the action before it is bounded."""
        for weight, bias in self.layers[:-1]:
            x = weight @ x + bias
            x = np.maximum(x, 0) if self.is_relu else np.tanh(x)
        weight, bias = self.layers[-1]
        return x, weight @ x + bias

    def _spread(self, hidden: NDArray[Any]) -> Any:
        arrays, kind = self.arrays, str(self.arrays["noise"])
        if kind == "constant":
            return np.exp(arrays["log_std"])
        if kind != "state-dependent":
            raise ValueError(f"{self.path} draws no random actions; give the size of the noise")
        log_std = arrays["log_std_weight"] @ hidden + arrays["log_std_bias"]
        return np.exp(np.clip(log_std, arrays["log_std_min"], arrays["log_std_max"]))


def _read(path: Path) -> dict[str, NDArray[Any]]:
    with open_arrays(path) as arrays:
        return {name: arrays[name] for name in arrays.names}
