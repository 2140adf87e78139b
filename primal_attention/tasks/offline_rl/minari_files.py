"""Minari data sets: a folder with `data` in it, in any of Minari's formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from primal_attention.tasks.offline_rl.environments import Environment
from primal_attention.tasks.offline_rl.simulators import package
from primal_attention.tasks.offline_rl.trajectories import Trajectories, joined

LIKE = "D4RL-like"


def minari_folder(folder: Path, name: str) -> Path:
    """Where a set of ours stands among Minari's: ``D4RL-like/hopper/medium-v0``."""
    which, _, kind = name.partition("-")
    return folder / LIKE / which / f"{kind}-v0"


def read_minari(path: Path, environment: Environment) -> Trajectories:
    """The episodes of a Minari data set, from its folder."""
    minari = package("minari")
    try:
        dataset = minari.MinariDataset(path / "data")
        episodes = [_trajectory(path, environment, each) for each in dataset.iterate_episodes()]
    except (OSError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{path} is not a whole Minari data set: {error}") from error
    if not episodes:
        raise ValueError(f"{path} has no episode")
    facts = {"name": dataset.spec.dataset_id, "origin": "Minari"}
    return joined(episodes, _our_facts(dataset) or facts)


def _our_facts(dataset: Any) -> dict[str, Any] | None:
    """What we wrote into the description of a set that we made."""
    text = dataset.storage.metadata.get("description") or ""
    if not text.startswith("{"):
        return None
    facts: dict[str, Any] = json.loads(text)
    return facts


def _trajectory(path: Path, environment: Environment, episode: Any) -> Trajectories:
    dims = {"observations": environment.state_dim, "actions": environment.action_dim}
    for name, dim in dims.items():
        shape = getattr(getattr(episode, name), "shape", ())  # a dict of observations has none
        if shape[1:] != (dim,):
            raise ValueError(
                f"{path}: {name} of episode {episode.id} must be [steps, {dim}], got {shape}"
            )
    length = len(episode.rewards)
    sizes = {"observations": length + 1, "actions": length, "terminations": length}
    for name, size in sizes.items():
        if (found := len(getattr(episode, name))) != size:
            raise ValueError(
                f"{path}: episode {episode.id} has {length} rewards and {found} {name}, not {size}"
            )
    if not length:
        raise ValueError(f"{path}: episode {episode.id} has no step")
    if not (episode.terminations[-1] or episode.truncations[-1]):
        raise ValueError(
            f"{path}: episode {episode.id} has no flag at its end, terminated or truncated"
        )
    return Trajectories(
        episode.observations[:-1],
        episode.actions,
        episode.rewards,
        np.array([length]),
        np.array([bool(episode.terminations[-1])]),
        episode.observations[-1:],
    )


def write_minari(folder: Path, name: str, found: Trajectories, simulator: Any) -> Path:
    """Write a set, final states included; one of the same name is replaced by the whole new one."""
    if found.final_states is None:
        raise ValueError(f"{name} has no final states, which Minari keeps")
    path = minari_folder(folder.resolve(), name)  # Minari loses its way from a relative folder
    incoming = path.with_name(f".{path.name}.incoming")
    shutil.rmtree(incoming, ignore_errors=True)
    (incoming / "data").mkdir(parents=True)
    storage = package("minari.dataset.minari_storage").MinariStorage.new(
        incoming / "data",
        simulator.observation_space,
        simulator.action_space,
        simulator.spec,
        data_format="hdf5",
    )
    storage.update_metadata(_metadata(name, found, simulator))
    storage.update_episodes(_buffers(found))
    shutil.rmtree(path, ignore_errors=True)
    incoming.replace(path)
    return path


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
