"""The environments, their reference returns, and the names of the data sets."""

from difflib import get_close_matches
from typing import Any, NamedTuple


class Environment(NamedTuple):
    """An environment of Gymnasium with the scale on which its returns are told."""

    gym_name: str  # without the version
    state_dim: int
    action_dim: int
    random_return: float  # D4RL's reference minimum
    expert_return: float  # D4RL's reference maximum
    targets: tuple[float, float]  # the returns that the papers ask of a model
    longest: int = 1000  # steps of an episode

    def score(self, returns: Any) -> Any:
        """Returns on D4RL's scale: 0 is a random policy, 100 an expert."""
        return 100 * (returns - self.random_return) / (self.expert_return - self.random_return)


ENVIRONMENTS: dict[str, Environment] = {
    "halfcheetah": Environment("HalfCheetah", 17, 6, -280.178953, 12135.0, (12000.0, 6000.0)),
    "hopper": Environment("Hopper", 11, 3, -20.272305, 3234.3, (3600.0, 1800.0)),
    "walker2d": Environment("Walker2d", 17, 6, 1.629008, 4592.3, (5000.0, 2500.0)),
}
KINDS = ("medium", "medium-replay", "medium-expert")
RL_SETS: tuple[str, ...] = tuple(f"{name}-{kind}" for name in ENVIRONMENTS for kind in KINDS)


def environment_of(name: str) -> Environment:
    """The environment of a set such as ``hopper-medium``."""
    check_set(name)
    return ENVIRONMENTS[name.partition("-")[0]]


def check_set(name: str) -> None:
    """Raise unless a set of that name can be."""
    if name not in RL_SETS:
        near = get_close_matches(name, RL_SETS, cutoff=0.5) or RL_SETS
        raise ValueError(f"no set is called {name!r}; did you mean one of {', '.join(near)}?")
