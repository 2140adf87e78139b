"""The hdf5 files of D4RL: transitions in a row, with flags where episodes end."""

from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.foreign_files import reading
from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.hdf5_files import open_hdf5
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
    with reading(path, "a whole hdf5 file of D4RL", "get it anew"), open_hdf5(path) as file:
        for name in _KEYS[3:]:
            if name not in file:
                raise ValueError(
                    f"it has no {name!r}: without it the end of episode 0 is not known"
                )
        arrays = {name: file[name] for name in _KEYS}
        for name, dims in zip(_KEYS, (2, 2, 1, 1, 1), strict=True):
            if arrays[name].ndim != dims:
                raise ValueError(f"{name} must have {dims} dimensions, got {arrays[name].shape}")
        return arrays


def _check_flags(path: Path, ends: Any, total: int, environment: Environment) -> None:
    """The last episode may be cut off, but not be longer than any can be."""
    last = int(ends[-1]) + 1 if len(ends) else 0
    if total - last > environment.longest or not len(ends):
        raise ValueError(
            f"{path}: episode {len(ends)} has no flag of an end, terminal or timeout, in "
            f"{total - last} steps"
        )
