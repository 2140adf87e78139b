"""Data sets like D4RL's, made by rolling out trained policies. They are not D4RL.

A set is a mixture of policies with noise, made chunk by chunk: each chunk has random numbers of its
own and a file of its own, so that what was interrupted goes on where it was, to the same numbers.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from primal_attention.tasks.offline_rl.agents import SAMPLED, Agent
from primal_attention.tasks.offline_rl.environments import RL_SETS, Environment, environment_of
from primal_attention.tasks.offline_rl.minari_files import write_minari
from primal_attention.tasks.offline_rl.prepared import read_trajectories, write_trajectories
from primal_attention.tasks.offline_rl.simulators import make_environment
from primal_attention.tasks.offline_rl.trajectories import Trajectories, joined

CHUNK = 10_000  # transitions, at least
ORIGIN = "D4RL-like"


class Behaviour(NamedTuple):
    """A policy by the end of its file's name, and its noise."""

    agent: str
    noise: float | str


_MEDIUM = {
    "halfcheetah": (Behaviour("ars_best", 0.1),),
    "hopper": (Behaviour("sac", SAMPLED),),
    "walker2d": (Behaviour("tqc", 0.3),),
}
_EXPERT = {
    "halfcheetah": (Behaviour("tqc", SAMPLED),),
    "hopper": (Behaviour("trpo", SAMPLED), Behaviour("tqc", SAMPLED)),
    "walker2d": (Behaviour("tqc", SAMPLED), Behaviour("sac", SAMPLED)),
}
_REPLAY = {
    "halfcheetah": (
        Behaviour("trpo", 0.5),
        Behaviour("trpo", SAMPLED),
        Behaviour("a2c", 0.3),
        Behaviour("a2c", SAMPLED),
        Behaviour("ars", 0.1),
        Behaviour("ppo", SAMPLED),
    ),
    "hopper": (
        Behaviour("a2c", 0.5),
        Behaviour("a2c", SAMPLED),
        Behaviour("ars", 0.3),
        Behaviour("ppo", 0.3),
        Behaviour("sac", SAMPLED),
    ),
    "walker2d": (
        Behaviour("a2c", 0.5),
        Behaviour("a2c", SAMPLED),
        Behaviour("ars", 0.3),
        Behaviour("ppo", 0.5),
        Behaviour("ars_best", 0.0),
    ),
}
Mixture = dict[Behaviour, float]
"""Behaviours and their shares of the transitions."""


def mixture_of(name: str) -> Mixture:
    """Who made a set such as ``hopper-medium-replay``."""
    environment_of(name)
    which, _, kind = name.partition("-")
    if kind == "medium-expert":
        return _shares(_MEDIUM[which], 0.5) | _shares(_EXPERT[which], 0.5)
    return _shares((_MEDIUM if kind == "medium" else _REPLAY)[which], 1.0)


def _shares(behaviours: tuple[Behaviour, ...], whole: float) -> Mixture:
    return {each: whole / len(behaviours) for each in behaviours}


class Chunk(NamedTuple):
    """A piece of a set: who makes it, and its random numbers."""

    behaviour: Behaviour
    transitions: int
    seed: tuple[int, ...]


def chunks_of(name: str, transitions: int, seed: int) -> list[Chunk]:
    """The pieces that a set is made of."""
    found = []
    for index, (behaviour, share) in enumerate(mixture_of(name).items()):
        left, number = round(transitions * share), 0
        while left > 0:
            size = min(CHUNK, left)
            found.append(Chunk(behaviour, size, (seed, RL_SETS.index(name), index, number)))
            left, number = left - size, number + 1
    return found


def make_set(
    name: str,
    agents: Path,
    folder: Path,
    *,
    transitions: int = 100_000,
    seed: int = 0,
    version: int = 5,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Roll out policies into a Minari data set and a prepared file, ``<folder>/<name>.npz``.

    Episodes are whole, so there are a few transitions more than asked for.

    Args:
        name: One of ``RL_SETS``.
        agents: Folder of the policies, ``Hopper-sac.npz`` and so on.
        folder: Where to write.
        transitions: How many, at least.
        seed: Of everything random.
        version: 5 or 4, of the environment.
        told: Is called with the number of chunks that are done, and of all.
    """
    environment = environment_of(name)
    if transitions < 1:
        raise ValueError(f"transitions must be positive, got {transitions}")
    chunks = chunks_of(name, transitions, seed)
    policies = {
        each.behaviour.agent: Agent(agents / _file(environment, each), environment)
        for each in chunks
    }
    unfinished = folder / f".{name}-{transitions}-{seed}-v{version}.making"
    parts = []
    for index, chunk in enumerate(chunks):
        told(index, len(chunks))
        path = unfinished / f"{index}.npz"
        if not path.is_file():
            policy = policies[chunk.behaviour.agent]
            made = roll_out(policy, environment, chunk, version)
            write_trajectories(path, made, half=False)
        parts.append(read_trajectories(path, environment))
    told(len(chunks), len(chunks))
    facts = _facts(name, environment, parts, chunks, seed, version)
    found = joined(parts, facts)
    write_minari(folder, name, found, make_environment(environment, version))
    path = folder / f"{name}.npz"
    write_trajectories(path, found)
    shutil.rmtree(unfinished)
    return path


def _file(environment: Environment, chunk: Chunk) -> str:
    return f"{environment.gym_name}-{chunk.behaviour.agent}.npz"


def roll_out(agent: Agent, environment: Environment, chunk: Chunk, version: int) -> Trajectories:
    """Whole episodes, until there are as many transitions as the chunk asks for."""
    rng = np.random.default_rng(chunk.seed)
    simulator = make_environment(environment, version)
    episodes, total = list[Trajectories](), 0
    while total < chunk.transitions:
        episodes.append(_episode(agent, simulator, rng, chunk.behaviour.noise))
        total += len(episodes[-1].rewards)
    simulator.close()
    return joined(episodes)


def _episode(
    agent: Agent, simulator: Any, rng: np.random.Generator, noise: float | str
) -> Trajectories:
    """One episode."""
    state, _ = simulator.reset(seed=int(rng.integers(2**31)))
    states, actions, rewards = [state], list[Any](), list[float]()
    terminated = truncated = False
    while not (terminated or truncated):
        actions.append(agent.act(states[-1], len(actions), rng, noise))
        state, reward, terminated, truncated, _ = simulator.step(actions[-1])
        states.append(state)
        rewards.append(float(reward))
    return Trajectories(
        np.array(states[:-1]),
        np.array(actions),
        np.array(rewards),
        np.array([len(rewards)]),
        np.array([bool(terminated)]),
        np.array(states[-1:]),
    )


def _facts(
    name: str,
    environment: Environment,
    parts: list[Trajectories],
    chunks: list[Chunk],
    seed: int,
    version: int,
) -> dict[str, Any]:
    """How the set was made, and the scores that were measured on it."""
    scores: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    for part, chunk in zip(parts, chunks, strict=True):
        behaviour = f"{_file(environment, chunk)} {chunk.behaviour.noise}"
        scores.setdefault(behaviour, []).extend(environment.score(part.returns).tolist())
        steps[behaviour] = steps.get(behaviour, 0) + int(part.lengths.sum())
    everything = np.concatenate(list(scores.values()))
    return {
        "name": f"{ORIGIN}/{name}",
        "origin": ORIGIN,
        "environment": f"{environment.gym_name}-v{version}",
        "seed": seed,
        "mean_score": round(float(everything.mean()), 2),
        "std_score": round(float(everything.std()), 2),
        "max_score": round(float(everything.max()), 2),
        "behaviours": {
            name: {
                "transitions": steps[name],
                "episodes": len(values),
                "score": round(float(np.mean(values)), 2),
            }
            for name, values in scores.items()
        },
    }
