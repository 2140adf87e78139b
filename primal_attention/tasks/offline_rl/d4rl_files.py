"""D4RL's hdf5 files: transitions in a row, with flags where episodes end.

Files may come from anyone: sizes are checked before anything is read.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size, reading
from primal_attention.tasks.offline_rl.environments import Environment, package
from primal_attention.tasks.offline_rl.trajectories import Trajectories, check_trajectories

_DIMS = {"observations": 2, "actions": 2, "rewards": 1, "terminals": 1, "timeouts": 1}
_ALWAYS, _TIMES = 2**28, 32  # bytes that any array may unpack to, and times the size of the file
_LONGEST_CHUNK = 2**26  # bytes that are unpacked in one piece


def d4rl_file(name: str) -> str:
    """Return the name of D4RL's file of a set."""
    which, _, kind = name.partition("-")
    return f"{which}_{kind.replace('-', '_')}-v2.hdf5"


def read_d4rl(path: Path, environment: Environment) -> Trajectories:
    """Read the episodes of a file; one that its end cuts off is left out, and counted."""
    h5py = package("h5py")
    with reading(path, "a whole hdf5 file of D4RL", "get it anew"):
        most = _ALWAYS + _TIMES * file_size(path)
        with h5py.File(path, "r") as file:
            arrays = {name: _array(h5py, file, name, most) for name in _DIMS}
        found = _episodes(arrays, environment.longest)
        found.facts.update(name=path.name, origin="D4RL")
        check_trajectories(found, environment)
        return found


def _episodes(arrays: dict[str, NDArray[Any]], longest: int) -> Trajectories:
    """Cut transitions into episodes at the flags."""
    for name, values in arrays.items():
        if values.ndim != _DIMS[name]:
            raise ValueError(f"{name} must have {_DIMS[name]} dimensions, got {values.shape}")
    if len(sizes := {len(values) for values in arrays.values()}) != 1:
        raise ValueError(f"its arrays have different lengths, {sorted(sizes)}")
    terminals, timeouts = (arrays[name].astype(bool) for name in ("terminals", "timeouts"))
    ends = np.flatnonzero(terminals | timeouts)
    total = int(ends[-1]) + 1 if len(ends) else 0
    left_out = len(terminals) - total
    if left_out > longest or not len(ends):
        raise ValueError(
            f"episode {len(ends)} has no flag of an end, terminal or timeout, in {left_out} steps"
        )
    states, actions, rewards = (arrays[name][:total] for name in list(_DIMS)[:3])
    lengths, facts = np.diff(ends, prepend=-1), {"left_out_transitions": left_out}
    return Trajectories(states, actions, rewards, lengths, terminals[ends], facts)


def _array(h5py: Any, file: Any, name: str, most: int) -> NDArray[Any]:
    """Read an array of numbers, as it stands in the file itself."""
    link = file.get(name, getlink=True)
    if link is None:
        raise ValueError(f"it has no {name!r}")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name!r} is a link, not an array of the file")
    found = file[name]
    if not isinstance(found, h5py.Dataset) or found.is_virtual or found.external:
        raise ValueError(f"{name!r} is no array of the file")
    if found.shape is None or found.dtype.kind not in "biuf" or found.dtype.itemsize > 8:
        raise ValueError(f"{name!r} holds {found.dtype}, not numbers")
    if math.prod(found.shape) * found.dtype.itemsize > most:
        raise ValueError(
            f"{name!r} unpacks to more than {_ALWAYS >> 20} MiB and {_TIMES} times the file"
        )
    if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > _LONGEST_CHUNK:
        raise ValueError(f"{name!r} has chunks of {found.chunks}")
    values: NDArray[Any] = found[()]
    return values
