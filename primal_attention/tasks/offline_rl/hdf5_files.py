"""Trajectories in hdf5: D4RL's files, and the folders of Minari.

A file of D4RL has transitions in a row, with flags where episodes end; a data set of Minari is a
folder with `data` in it, which holds a file of episodes and a description. Files may come from
anyone: sizes are checked before anything is read.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.atomic_files import writing_to
from primal_attention.foreign_files import file_size, read_text, reading
from primal_attention.tasks.offline_rl.environments import Environment, package
from primal_attention.tasks.offline_rl.trajectories import Trajectories, joined

LIKE = "D4RL-like"
_KEYS = ("observations", "actions", "rewards", "terminals", "timeouts")
_LONGEST_DESCRIPTION = 2**24  # bytes
_ALWAYS, _TIMES = 2**28, 32  # bytes that any file may unpack to, and times the size of a large one
_LONGEST_CHUNK = 2**26  # bytes that are unpacked in one piece
_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, Fletcher's checksum, LZF: all are h5py's own


class Hdf5File:
    """The arrays of numbers of a file, by name; all together unpack to a bounded size."""

    def __init__(self, path: Path, file: Any):
        self._file = file
        self._left = _ALWAYS + _TIMES * file_size(path)

    def __contains__(self, name: str) -> bool:
        return name in self._file

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays and groups at the top of the file."""
        return tuple(self._file)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Read an array of numbers, as it stands in the file itself."""
        found = self._found(name)
        size = math.prod(found.shape) * found.dtype.itemsize
        self._left -= size
        if self._left < 0:
            raise ValueError(
                f"its arrays up to {name!r} unpack to more than {_ALWAYS >> 20} MiB and {_TIMES} "
                "times its size"
            )
        filters = found.id.get_create_plist()
        kinds = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
        if not set(kinds) <= _FILTERS:
            raise ValueError(f"{name!r} is compressed by the methods {kinds} of hdf5")
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > _LONGEST_CHUNK:
            raise ValueError(f"{name!r} has chunks of {found.chunks}")
        values: NDArray[Any] = found[()]
        return values

    def _found(self, name: str) -> Any:
        """Find a data set that takes nothing from other files."""
        h5py, place = package("h5py"), self._file
        for part in name.split("/"):
            link = place.get(part, getlink=True) if isinstance(place, h5py.Group) else None
            if link is None:
                raise ValueError(f"it has no {name!r}")
            if not isinstance(link, h5py.HardLink):
                raise ValueError(f"{name!r} is a link, not an array of the file")
            place = place[part]
        if not isinstance(place, h5py.Dataset) or place.is_virtual or place.external:
            raise ValueError(f"{name!r} is no array of the file")
        if place.shape is None or place.dtype.kind not in "biuf" or place.dtype.itemsize > 8:
            raise ValueError(f"{name!r} holds {place.dtype}, not numbers")
        return place


@contextmanager
def open_hdf5(path: Path) -> Iterator[Hdf5File]:
    """Open the arrays of an hdf5 file.

    Raises:
        Exception: Of any kind, and without the name of the file: to be called within ``reading``.
    """
    h5py = package("h5py")
    file_size(path)
    with h5py.File(path, "r") as file:
        yield Hdf5File(path, file)


def d4rl_file(name: str) -> str:
    """Return the name of D4RL's file of a set."""
    which, _, kind = name.partition("-")
    return f"{which}_{kind.replace('-', '_')}-v2.hdf5"


def read_d4rl(path: Path, environment: Environment) -> Trajectories:
    """Read the episodes of a file; one that its end cuts off is left out, and counted."""
    with reading(path, "a whole hdf5 file of D4RL", "get it anew"), open_hdf5(path) as file:
        if missing := [name for name in _KEYS[3:] if name not in file]:
            raise ValueError(
                f"it has no {missing[0]!r}: without it the end of episode 0 is not known"
            )
        arrays = {name: file[name] for name in _KEYS}
        for name, dims in zip(_KEYS, (2, 2, 1, 1, 1), strict=True):
            if arrays[name].ndim != dims:
                raise ValueError(f"{name} must have {dims} dimensions, got {arrays[name].shape}")
    sizes = {name: len(values) for name, values in arrays.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"{path}: its arrays have different lengths, {sizes}")
    terminals, timeouts = (arrays[name].astype(bool) for name in ("terminals", "timeouts"))
    ends = np.flatnonzero(terminals | timeouts)
    total = int(ends[-1]) + 1 if len(ends) else 0
    left_out = len(terminals) - total
    if left_out > environment.longest or not len(ends):
        raise ValueError(
            f"{path}: episode {len(ends)} has no flag of an end, terminal or timeout, in "
            f"{left_out} steps"
        )
    return Trajectories(
        arrays["observations"][:total],
        arrays["actions"][:total],
        arrays["rewards"][:total],
        np.diff(ends, prepend=-1),
        terminals[ends],
        facts={"name": path.name, "origin": "D4RL", "left_out_transitions": left_out},
    )


def minari_folder(folder: Path, name: str) -> Path:
    """Return the place of a set of ours among Minari's: ``D4RL-like/hopper/medium-v0``."""
    which, _, kind = name.partition("-")
    return folder / LIKE / which / f"{kind}-v0"


def read_minari(path: Path, environment: Environment) -> Trajectories:
    """Read the episodes of a Minari data set in hdf5, from its folder.

    Facts are those that we wrote into the description of a set of ours, or else its name.
    """
    main, about = path / "data" / "main_data.hdf5", path / "data" / "metadata.json"
    if not main.is_file():
        raise FileNotFoundError(f"{main} is missing; data sets of Minari are read in hdf5 only")
    remedy = "get the data set anew"
    with reading(main, "a whole file of Minari", remedy), open_hdf5(main) as file:
        count = len(file.names)
        if {f"episode_{number}" for number in range(count)} != set(file.names):
            raise ValueError(f"its {count} episodes are not episode_0 and so on")
        if not count:
            raise ValueError("it has no episode")
        found = joined([_episode(file, number, environment) for number in range(count)])
    with reading(about, "the description of a data set of Minari", remedy):
        metadata = json.loads(read_text(about, _LONGEST_DESCRIPTION))
        text = metadata.get("description") or ""
        facts = {"name": str(metadata["dataset_id"]), "origin": "Minari"}
        return replace(found, facts=json.loads(text) if text.startswith("{") else facts)


def _episode(file: Hdf5File, number: int, environment: Environment) -> Trajectories:
    keys = ("observations", "actions", "rewards", "terminations", "truncations")
    arrays = {key: file[f"episode_{number}/{key}"] for key in keys}
    dims = {"observations": environment.state_dim, "actions": environment.action_dim}
    for key, dim in dims.items():
        if (shape := arrays[key].shape)[1:] != (dim,):
            raise ValueError(f"{key} of episode {number} must be [steps, {dim}], got {shape}")
    if arrays["rewards"].ndim != 1 or not len(arrays["rewards"]):
        raise ValueError(f"episode {number} has no step")
    length = len(arrays["rewards"])
    for key, values in arrays.items():
        size = length + 1 if key == "observations" else length
        if len(values) != size or values.ndim != (2 if key in dims else 1):
            raise ValueError(
                f"episode {number} has {length} rewards and {key} {values.shape}, not {size}"
            )
    terminated = bool(arrays["terminations"][-1])
    if not (terminated or arrays["truncations"][-1]):
        raise ValueError(f"episode {number} has no flag at its end, terminated or truncated")
    return Trajectories(
        arrays["observations"][:-1],
        arrays["actions"],
        arrays["rewards"],
        np.array([length]),
        np.array([terminated]),
        arrays["observations"][-1:],
    )


def write_minari(folder: Path, name: str, found: Trajectories, simulator: Any) -> Path:
    """Write a set, final states included; one of the same name is replaced as a whole."""
    if found.final_states is None:
        raise ValueError(f"{name} has no final states, which Minari keeps")
    path = minari_folder(folder.resolve(), name)  # Minari loses its way from a relative folder
    incoming, outgoing = (path.with_name(f".{path.name}.{end}") for end in ("incoming", "outgoing"))
    for left in (incoming, outgoing):
        shutil.rmtree(left, ignore_errors=True)
    try:
        with writing_to(path):
            (incoming / "data").mkdir(parents=True)
            _take_room(incoming / "room", found)
            storage = package("minari.dataset.minari_storage").MinariStorage.new(
                incoming / "data",
                simulator.observation_space,
                simulator.action_space,
                simulator.spec,
                data_format="hdf5",
            )
            metadata = {
                "dataset_id": path.relative_to(folder.resolve()).as_posix(),
                "minari_version": package("minari").__version__,
                "description": json.dumps(found.facts),
                "algorithm_name": "a mixture of trained policies",
                "eval_env_spec": simulator.spec.to_json(),
            }
            storage.update_metadata(metadata)
            storage.update_episodes(_buffers(found))
            if path.exists():
                path.replace(outgoing)
            incoming.replace(path)
    finally:
        for left in (incoming, outgoing):
            shutil.rmtree(left, ignore_errors=True)
    return path


def _take_room(path: Path, found: Trajectories) -> None:
    """Raise where there is no room for the data, by taking it and giving it back.

    A file of hdf5 that runs out of room is not closed without a traceback for each of its objects.
    """
    arrays = (found.states, found.actions, found.rewards)
    numbers = sum(each.size for each in arrays)
    with path.open("wb") as file:
        file.write(bytes(8 * numbers + 2**15 * (len(found) + 2)))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _buffers(found: Trajectories) -> Any:
    """Yield the episodes as Minari takes them."""
    final = found.final_states
    assert final is not None
    buffer = package("minari.data_collector.episode_buffer").EpisodeBuffer
    for index, (start, length) in enumerate(zip(found.starts, found.lengths, strict=True)):
        steps = slice(start, start + length)
        at_end = np.arange(length) == length - 1
        states = np.concatenate([found.states[steps], final[index : index + 1]])
        yield buffer(
            id=index,
            observations=states.astype(np.float64),
            actions=found.actions[steps].astype(np.float32),
            rewards=found.rewards[steps].astype(np.float64),
            terminations=at_end & found.terminated[index],
            truncations=at_end & ~found.terminated[index],
        )
