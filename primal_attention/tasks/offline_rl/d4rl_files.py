"""The hdf5 files of D4RL: transitions in a row, with flags where episodes end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.simulators import package
from primal_attention.tasks.offline_rl.trajectories import Trajectories

_KEYS = ("observations", "actions", "rewards", "terminals", "timeouts")


def d4rl_file(name: str) -> str:
    """The name of D4RL's file of a set."""
    which, _, kind = name.partition("-")
    return f"{which}_{kind.replace('-', '_')}-v2.hdf5"


def read_d4rl(path: Path, environment: Environment) -> Trajectories:
    """The episodes of a file; one that the end of the file cuts off is left out, and counted."""
    arrays = _arrays(path)
    sizes = {name: len(values) for name, values in arrays.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"{path}: its arrays have different lengths, {sizes}")
    terminals, timeouts = (arrays[name].astype(bool) for name in ("terminals", "timeouts"))
    ends = np.flatnonzero(terminals | timeouts)
    _check_flags(path, ends, len(terminals), environment)
    total = int(ends[-1]) + 1
    left_out = len(terminals) - total
    return Trajectories(
        arrays["observations"][:total],
        arrays["actions"][:total],
        arrays["rewards"][:total],
        np.diff(ends, prepend=-1),
        terminals[ends],
        facts={"name": path.name, "origin": "D4RL", "left_out_transitions": left_out},
    )


def _arrays(path: Path) -> dict[str, Any]:
    h5py = package("h5py")
    try:
        with h5py.File(path, "r") as file:
            for name in _KEYS:
                if name not in file:
                    raise ValueError(
                        f"{path} has no {name!r}: without it the end of episode 0 is not known"
                        if name in _KEYS[3:]
                        else f"{path} has no {name!r}"
                    )
            return {name: file[name][()] for name in _KEYS}
    except (OSError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole hdf5 file: {error}") from error


def _check_flags(path: Path, ends: Any, total: int, environment: Environment) -> None:
    """The last episode may be cut off, but not be longer than any can be."""
    last = int(ends[-1]) + 1 if len(ends) else 0
    if total - last > environment.longest or not len(ends):
        raise ValueError(
            f"{path}: episode {len(ends)} has no flag of an end, terminal or timeout, in "
            f"{total - last} steps"
        )
