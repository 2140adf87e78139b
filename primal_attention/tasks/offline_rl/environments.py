"""The environments, their reference returns, the names of the data sets; Gymnasium, on demand."""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from primal_attention.extras import needing
from primal_attention.tasks.prepared import name_near

VERSIONS = (5, 4)  # of Gymnasium's environments


class Environment(NamedTuple):
    """An environment of Gymnasium with the scale on which its returns are told."""

    gym_name: str  # without the version
    state_dim: int
    action_dim: int
    random_return: float  # D4RL's reference minimum
    expert_return: float  # D4RL's reference maximum
    targets: tuple[float, float]  # the returns that the papers ask of a model
    longest: int = 1000  # steps of an episode

    def score(self, returns: Any) -> Any:
        """Returns on D4RL's scale: 0 is a random policy, 100 an expert."""
        return 100 * (returns - self.random_return) / (self.expert_return - self.random_return)


ENVIRONMENTS: dict[str, Environment] = {
    "halfcheetah": Environment("HalfCheetah", 17, 6, -280.178953, 12135.0, (12000.0, 6000.0)),
    "hopper": Environment("Hopper", 11, 3, -20.272305, 3234.3, (3600.0, 1800.0)),
    "walker2d": Environment("Walker2d", 17, 6, 1.629008, 4592.3, (5000.0, 2500.0)),
}
KINDS = ("medium", "medium-replay", "medium-expert")
RL_SETS: tuple[str, ...] = tuple(f"{name}-{kind}" for name in ENVIRONMENTS for kind in KINDS)


def environment_of(name: str) -> Environment:
    """Return the environment of a set such as ``hopper-medium``."""
    if name not in RL_SETS:
        near = name_near(name, RL_SETS)
        raise ValueError(f"no set is called {name!r}; did you mean one of {near}?")
    return ENVIRONMENTS[name.partition("-")[0]]


def package(name: str) -> Any:
    """Import a package of the extra ``rl``."""
    with needing(f"this needs {name.partition('.')[0]}", "rl"):
        return importlib.import_module(name)


def make_environment(environment: Environment, version: int = 5, **options: Any) -> Any:
    """Make an environment, without a window.

    Args:
        environment: Which.
        version: 5 or 4, of Gymnasium's.
        **options: Go to ``gymnasium.make``.
    """
    if version not in VERSIONS:
        raise ValueError(f"version must be one of {VERSIONS}, got {version}")
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")  # pictures are made off the screen
    gymnasium, mujoco = package("gymnasium"), package("mujoco")
    with warnings.catch_warnings(), _silent(mujoco):
        warnings.simplefilter("ignore", DeprecationWarning)  # that there is a version 5
        return gymnasium.make(f"{environment.gym_name}-v{version}", **options)


@contextmanager
def _silent(mujoco: Any) -> Iterator[None]:
    """MuJoCo prints, and logs to a file where it runs, what it deprecates in Gymnasium's models."""
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
