"""Where the trajectories of a set are read from."""

import os
from pathlib import Path

from primal_attention.tasks.offline_rl.d4rl_files import d4rl_file, read_d4rl
from primal_attention.tasks.offline_rl.environments import check_set, environment_of
from primal_attention.tasks.offline_rl.minari_files import minari_folder, read_minari
from primal_attention.tasks.offline_rl.prepared import read_trajectories, write_trajectories
from primal_attention.tasks.offline_rl.trajectories import Trajectories, check_trajectories


def rl_folder(folder: Path | None = None) -> Path:
    """The folder that is given, else ``rl`` where ``PRIMAL_DATA`` points, else ``data/rl``."""
    return Path(os.environ.get("PRIMAL_DATA", "data")) / "rl" if folder is None else Path(folder)


def load_rl(name: str, folder: Path | None = None) -> Trajectories:
    """The trajectories of a set, checked.

    Args:
        name: One of ``RL_SETS``.
        folder: Where to look for, in this order: a prepared ``<name>.npz``; D4RL's own
            ``<name>.hdf5`` or ``hopper_medium-v2.hdf5``; a Minari data set in ``<name>``,
            ``D4RL-like/hopper/medium-v0`` or ``mujoco/hopper/medium-v0``. By default ``rl`` in the
            folder that the environment variable ``PRIMAL_DATA`` names, or in ``data``.
    """
    place = find_rl(name, folder)
    if place is None:
        raise FileNotFoundError(
            f"{name}: no data in {rl_folder(folder)}. Put a prepared {name}.npz, D4RL's "
            f"{d4rl_file(name)} or a Minari data set there, or make one: primal data rl {name} "
            "--agents <folder of policies>"
        )
    return _read(name, place)


def find_rl(name: str, folder: Path | None = None) -> Path | None:
    """Where ``load_rl`` would read a set from; None where it is not at hand."""
    prepared = rl_folder(folder) / f"{name}.npz"
    return prepared if prepared.is_file() else _unprepared(name, rl_folder(folder))


def prepare_rl(name: str, folder: Path | None = None, out: Path | None = None) -> Path:
    """Write a set to ``<out>/<name>.npz``, which loads fast and without any other package.

    Args:
        name: As for ``load_rl``.
        folder: Where its files are; an older prepared file there is not read.
        out: Where to write; the folder itself unless told.
    """
    folder = rl_folder(folder)
    place = _unprepared(name, folder)
    if place is None:
        raise FileNotFoundError(
            f"{name}: neither an hdf5 file of D4RL nor a Minari data set is in {folder}; "
            "--agents <folder of policies> makes one"
        )
    path = (folder if out is None else Path(out)) / f"{name}.npz"
    write_trajectories(path, _read(name, place))
    return path


def _unprepared(name: str, folder: Path) -> Path | None:
    check_set(name)
    which, _, kind = name.partition("-")
    files = (folder / f"{name}.hdf5", folder / d4rl_file(name))
    minari = (
        folder / name,
        minari_folder(folder, name),
        folder / "mujoco" / which / f"{kind}-v0",
    )
    found = [each for each in files if each.is_file()]
    found += [each for each in minari if (each / "data").is_dir()]
    return found[0] if found else None


def _read(name: str, place: Path) -> Trajectories:
    environment = environment_of(name)
    if place.suffix == ".npz":
        return read_trajectories(place, environment)
    found = (read_d4rl if place.is_file() else read_minari)(place, environment)
    check_trajectories(found, environment, place)
    return found
