"""Minari data sets: a folder with `data` in it, which holds an hdf5 file and a description."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.atomic_files import writing_to
from primal_attention.foreign_files import read_text, reading
from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.hdf5_files import Hdf5File, open_hdf5
from primal_attention.tasks.offline_rl.simulators import package
from primal_attention.tasks.offline_rl.trajectories import Trajectories, joined

LIKE = "D4RL-like"
EPISODE = "episode_"
MOST = 2**24  # bytes of a description


def minari_folder(folder: Path, name: str) -> Path:
    """Where a set of ours stands among Minari's: ``D4RL-like/hopper/medium-v0``."""
    which, _, kind = name.partition("-")
    return folder / LIKE / which / f"{kind}-v0"


def read_minari(path: Path, environment: Environment) -> Trajectories:
    """The episodes of a Minari data set in hdf5, from its folder.

    Its description names spaces and an environment, which Minari would build; they are not needed.
    """
    main, about = path / "data" / "main_data.hdf5", path / "data" / "metadata.json"
    if not main.is_file():
        raise FileNotFoundError(f"{main} is missing; data sets of Minari are read in hdf5 only")
    remedy = "get the data set anew"
    with reading(main, "a whole file of Minari", remedy), open_hdf5(main) as file:
        episodes = [_trajectory(file, name, environment) for name in _episodes(file)]
        if not episodes:
            raise ValueError("it has no episode")
        found = joined(episodes)
    with reading(about, "the description of a data set of Minari", remedy):
        facts = _facts(json.loads(read_text(about, MOST)))
    return replace(found, facts=facts)


def _facts(metadata: dict[str, Any]) -> dict[str, Any]:
    """What we wrote into the description of a set that we made, or else its name."""
    text = metadata.get("description") or ""
    if text.startswith("{"):
        facts: dict[str, Any] = json.loads(text)
        return facts
    return {"name": str(metadata["dataset_id"]), "origin": "Minari"}


def _episodes(file: Hdf5File) -> list[str]:
    """The names of all episodes, in order; they are numbered from 0."""
    names = [f"{EPISODE}{number}" for number in range(len(file.names))]
    if set(names) != set(file.names):
        raise ValueError(f"its {len(names)} episodes are not {EPISODE}0 and so on")
    return names


def _trajectory(file: Hdf5File, name: str, environment: Environment) -> Trajectories:
    number = name.removeprefix(EPISODE)
    keys = ("observations", "actions", "rewards", "terminations", "truncations")
    arrays = {key: file[f"{name}/{key}"] for key in keys}
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
    """Write a set, final states included; one of the same name is replaced by the whole new one."""
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
            storage.update_metadata(_metadata(name, found, simulator))
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


def _metadata(name: str, found: Trajectories, simulator: Any) -> dict[str, Any]:
    which, _, kind = name.partition("-")
    return {
        "dataset_id": f"{LIKE}/{which}/{kind}-v0",
        "minari_version": package("minari").__version__,
        "description": json.dumps(found.facts),
        "algorithm_name": "a mixture of trained policies",
        "eval_env_spec": simulator.spec.to_json(),
    }


def _buffers(found: Trajectories) -> Any:
    """The episodes as Minari takes them."""
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
