"""The settings of Primal-Attention that the authors' scripts choose for each set."""

from typing import NamedTuple

from primal_attention.models.stacks import mechanism_of
from primal_attention.training.recipe import Recipe


class Directions(NamedTuple):
    """Directions s, weight eta of the objective, landmarks a direction."""

    num: int
    eta: float
    samples: int = 10


def with_directions(recipe: Recipe, directions: Directions) -> Recipe:
    """Set the directions of a recipe whose model has Primal layers.

    Of layers with a learned time the number of directions alone: they sample nothing, and no weight
    of their objective has been chosen yet.
    """
    mechanism = mechanism_of(recipe.model.name)
    if mechanism == "primal_time":
        return recipe.replace(attention={"num_directions": directions.num})
    if mechanism != "primal":
        return recipe
    options = {
        "num_directions": directions.num,
        "samples_per_direction": directions.samples,
    }
    return recipe.replace(eta=directions.eta, attention=options)
