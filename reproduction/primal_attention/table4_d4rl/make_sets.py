"""Make data sets like D4RL's by rolling out trained policies. They are not D4RL.

    python reproduction/primal_attention/table4_d4rl/make_sets.py FOLDER_OF_POLICIES --out data/rl

A set is a mixture of policies with noise, made chunk by chunk; each chunk has random numbers of its
own, so the same command makes the same set.

A policy is a plain network in an `.npz` file: linear layers ``w0``, ``b0``, ``w1``, ... with
``activation`` between them, how a random action is drawn (``noise``), how the action is bounded
(``squash``), and how observations are normalised.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import reading
from primal_attention.tasks.offline_rl import RL, RL_SETS, Trajectories, environment_of
from primal_attention.tasks.offline_rl.environments import Environment, make_environment

LIKE = "D4RL-like"
CHUNK = 10_000  # transitions, at least
SAMPLED = "sampled"


class Agent:
    """A policy of one environment.

    Args:
        path: Of the file.
        environment: Which it must fit.
    """

    def __init__(self, path: Path, environment: Environment):
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"there is no policy {path}")
        with reading(path, f"a policy of {environment.gym_name}", "get the whole file anew"):
            with np.load(path) as file:
                self.arrays = arrays = dict(file)
            layers = range(int(arrays["n_layers"]))
            self.layers = [(arrays[f"w{i}"], arrays[f"b{i}"]) for i in layers]
            dims = int(arrays["obs_dim"]) - int(arrays["time_feature"]), int(arrays["act_dim"])
            if dims != (environment.state_dim, environment.action_dim):
                raise ValueError(f"it has states and actions of {dims}")
            self.is_relu = str(arrays["activation"]) == "relu"
            self.squashes = str(arrays["squash"]) == "tanh"
            self._try()

    def act(
        self,
        observation: NDArray[np.float64],
        step: int,
        rng: np.random.Generator,
        noise: float | str,
    ) -> NDArray[np.float32]:
        """Return an action in [-1, 1].

        Args:
            observation: As the environment gave it.
            step: Its number in the episode, from 0.
            rng: Of the noise.
            noise: ``"sampled"`` as the policy was trained, or the size of normal noise that is
                added to the action it prefers.
        """
        arrays, x = self.arrays, np.asarray(observation, np.float64)
        if arrays["time_feature"]:
            x = np.append(x, 1 - step / arrays["time_limit"])
        if arrays["normalise_obs"]:
            x = (x - arrays["obs_mean"]) / np.sqrt(arrays["obs_var"] + arrays["obs_eps"])
            x = np.clip(x, -arrays["obs_clip"], arrays["obs_clip"])
        hidden: NDArray[Any] = x.astype(np.float32)
        for weight, bias in self.layers[:-1]:
            hidden = weight @ hidden + bias
            hidden = np.maximum(hidden, 0) if self.is_relu else np.tanh(hidden)
        weight, bias = self.layers[-1]
        mean = weight @ hidden + bias
        if noise == SAMPLED:
            mean = mean + self._spread(hidden) * rng.standard_normal(mean.shape)
        action = np.tanh(mean) if self.squashes else mean
        if not isinstance(noise, str):
            action = action + noise * rng.standard_normal(action.shape)
        bounded: NDArray[np.float32] = np.clip(action, -1, 1).astype(np.float32)
        return bounded

    def _try(self) -> None:
        """Act once, so that arrays that do not fit each other are found now."""
        state = np.zeros(int(self.arrays["obs_dim"]) - int(self.arrays["time_feature"]))
        spread = str(self.arrays["noise"]) in ("constant", "state-dependent")
        with np.errstate(all="ignore"):  # told below
            action = self.act(state, 0, np.random.default_rng(0), SAMPLED if spread else 0.0)
        if action.shape != (int(self.arrays["act_dim"]),) or not np.isfinite(action).all():
            raise ValueError(f"its action in the state 0 is {str(action)[:60]}")

    def _spread(self, hidden: NDArray[Any]) -> Any:
        arrays, kind = self.arrays, str(self.arrays["noise"])
        if kind == "constant":
            return np.exp(arrays["log_std"])
        if kind != "state-dependent":
            raise ValueError(f"{self.path} draws no random actions; give the size of the noise")
        log_std = arrays["log_std_weight"] @ hidden + arrays["log_std_bias"]
        return np.exp(np.clip(log_std, arrays["log_std_min"], arrays["log_std_max"]))


class Behaviour(NamedTuple):
    """A policy by the end of its file's name, and its noise."""

    agent: str
    noise: float | str


Behaviours = dict[str, tuple[float | str, ...]]
"""The noises of each policy."""

_MEDIUM: dict[str, Behaviours] = {
    "halfcheetah": {"ars_best": (0.1,)},
    "hopper": {"sac": (SAMPLED,)},
    "walker2d": {"tqc": (0.3,)},
}
_EXPERT: dict[str, Behaviours] = {
    "halfcheetah": {"tqc": (SAMPLED,)},
    "hopper": {"trpo": (SAMPLED,), "tqc": (SAMPLED,)},
    "walker2d": {"tqc": (SAMPLED,), "sac": (SAMPLED,)},
}
_REPLAY: dict[str, Behaviours] = {
    "halfcheetah": {
        "trpo": (0.5, SAMPLED),
        "a2c": (0.3, SAMPLED),
        "ars": (0.1,),
        "ppo": (SAMPLED,),
    },
    "hopper": {"a2c": (0.5, SAMPLED), "ars": (0.3,), "ppo": (0.3,), "sac": (SAMPLED,)},
    "walker2d": {"a2c": (0.5, SAMPLED), "ars": (0.3,), "ppo": (0.5,), "ars_best": (0.0,)},
}
Mixture = dict[Behaviour, float]
"""Behaviours and their shares of the transitions."""


def mixture_of(name: str) -> Mixture:
    """Return the behaviours that make a set such as ``hopper-medium-replay``."""
    environment_of(name)
    which, _, kind = name.partition("-")
    if kind == "medium-expert":
        return _shares(_MEDIUM[which], 0.5) | _shares(_EXPERT[which], 0.5)
    return _shares((_MEDIUM if kind == "medium" else _REPLAY)[which], 1.0)


def _shares(behaviours: Behaviours, whole: float) -> Mixture:
    found = [Behaviour(agent, noise) for agent, noises in behaviours.items() for noise in noises]
    return {each: whole / len(found) for each in found}


class Chunk(NamedTuple):
    """A piece of a set: who makes it, and its random numbers."""

    behaviour: Behaviour
    transitions: int
    seed: tuple[int, ...]


def chunks_of(name: str, transitions: int, seed: int) -> list[Chunk]:
    """List the chunks that a set is made of."""
    found = []
    for index, (behaviour, share) in enumerate(mixture_of(name).items()):
        left, number = round(transitions * share), 0
        while left > 0:
            size = min(CHUNK, left)
            found.append(Chunk(behaviour, size, (seed, RL_SETS.index(name), index, number)))
            left, number = left - size, number + 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "agents", type=Path, help="folder of the policies, Hopper-sac.npz and so on"
    )
    parser.add_argument("names", nargs="*", default=RL_SETS, help="sets, default: all")
    parser.add_argument("--out", type=Path, help="folder of the sets, default: as for training")
    parser.add_argument("--transitions", type=int, default=100_000, help="of each set, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--version", type=int, default=5, help="5 or 4, of the environments")
    given = parser.parse_args()
    for name in given.names:
        found = make_set(
            name,
            given.agents,
            transitions=given.transitions,
            seed=given.seed,
            version=given.version,
        )
        path = RL.target(name, None, given.out)
        RL.write(path, found)
        facts = found.facts
        print(
            f"{path}: {facts['name']}, {len(found)} episodes, {len(found.rewards)} transitions, "
            f"mean score {facts['mean_score']} (best {facts['max_score']})"
        )


def make_set(
    name: str, agents: Path, *, transitions: int = 100_000, seed: int = 0, version: int = 5
) -> Trajectories:
    """Roll out the policies of a set.

    Episodes are whole, so there are a few transitions more than asked for.

    Args:
        name: One of ``RL_SETS``.
        agents: Folder of the policies.
        transitions: How many, at least.
        seed: Of everything random.
        version: 5 or 4, of the environment.
    """
    environment = environment_of(name)
    if transitions < 1:
        raise ValueError(f"transitions must be positive, got {transitions}")
    chunks = chunks_of(name, transitions, seed)
    policies = {
        each.behaviour.agent: Agent(agents / _file(environment, each), environment)
        for each in chunks
    }
    parts = [
        make_episodes(policies[each.behaviour.agent], environment, each, version) for each in chunks
    ]
    facts = {
        "name": f"{LIKE}/{name}",
        "origin": LIKE,
        "environment": f"{environment.gym_name}-v{version}",
        "seed": seed,
        **_scores(environment, parts, chunks),
    }
    return joined(parts, facts)


def joined(parts: Sequence[Trajectories], facts: dict[str, Any]) -> Trajectories:
    """Join the episodes of several, one after the other."""
    names = ("states", "actions", "rewards", "lengths", "terminated")
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return Trajectories(*arrays, facts)


def _file(environment: Environment, chunk: Chunk) -> str:
    return f"{environment.gym_name}-{chunk.behaviour.agent}.npz"


def make_episodes(
    agent: Agent, environment: Environment, chunk: Chunk, version: int
) -> Trajectories:
    """Play whole episodes, until there are as many transitions as the chunk asks for."""
    rng = np.random.default_rng(chunk.seed)
    simulator = make_environment(environment, version)
    episodes, total = list[Trajectories](), 0
    while total < chunk.transitions:
        episodes.append(_episode(agent, simulator, rng, chunk.behaviour.noise))
        total += len(episodes[-1].rewards)
    simulator.close()
    return joined(episodes, {})


def _episode(
    agent: Agent, simulator: Any, rng: np.random.Generator, noise: float | str
) -> Trajectories:
    state, _ = simulator.reset(seed=int(rng.integers(2**31)))
    states, actions, rewards = [state], list[Any](), list[float]()
    terminated = truncated = False
    while not (terminated or truncated):
        actions.append(agent.act(states[-1], len(actions), rng, noise))
        state, reward, terminated, truncated, _ = simulator.step(actions[-1])
        states.append(state)
        rewards.append(float(reward))
    steps = (np.array(each, np.float32) for each in (states[:-1], actions, rewards))
    return Trajectories(*steps, np.array([len(rewards)]), np.array([bool(terminated)]))


def _scores(
    environment: Environment, parts: list[Trajectories], chunks: list[Chunk]
) -> dict[str, Any]:
    """Summarise the scores of all episodes, and by behaviour."""
    scores: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    for part, chunk in zip(parts, chunks, strict=True):
        behaviour = f"{_file(environment, chunk)} {chunk.behaviour.noise}"
        scores.setdefault(behaviour, []).extend(environment.score(part.returns).tolist())
        steps[behaviour] = steps.get(behaviour, 0) + int(part.lengths.sum())
    everything = np.concatenate(list(scores.values()))
    return {
        "mean_score": _mean(everything),
        "std_score": round(float(everything.std()), 2),
        "max_score": round(float(everything.max()), 2),
        "behaviours": {
            name: {"transitions": steps[name], "episodes": len(values), "score": _mean(values)}
            for name, values in scores.items()
        },
    }


def _mean(values: Any) -> float:
    return round(float(np.mean(values)), 2)


if __name__ == "__main__":
    main()
