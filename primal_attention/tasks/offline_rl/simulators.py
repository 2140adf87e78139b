"""Gymnasium, imported when it is needed."""

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from primal_attention.tasks.offline_rl.environments import Environment

VERSIONS = (5, 4)


def package(name: str) -> Any:
    """A package of the extra ``rl``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        message = f"this needs {error.name}: pip install 'primal-attention[rl]'"
        raise ModuleNotFoundError(message, name=error.name) from error


def make_environment(environment: Environment, version: int = 5, **options: Any) -> Any:
    """The environment, without a window.

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
