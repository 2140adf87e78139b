"""Table 7: the number s of directions of the Primal layer, on D4RL-like data."""

from collections.abc import Iterator

from primal_attention.tasks import RL_SETS
from primal_attention.training import Recipe, find_recipe

DIRECTIONS = (32, 64, 96)


def recipes() -> Iterator[Recipe]:
    """The paper's grid, with one seed as there."""
    for name in RL_SETS:
        plain = find_recipe(f"rl/{name}", "primal_plus", "paper")
        for directions in DIRECTIONS:
            yield plain.with_settings([f"attention.num_directions={directions}"])
