"""A task domain: all that training, the command line and the suite need to know of it.

With the settings of Primal-Attention that recipes of several domains choose for each set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import nn

from primal_attention.models.stacks import mechanism_of
from primal_attention.tasks import Sizes, Task
from primal_attention.training.domains.sequences import build_sequence_model
from primal_attention.training.recipe import Recipe


def _find_none(name: str, folder: Path | None) -> Path | None:
    return None


@dataclass(frozen=True)
class Domain:
    """Data sets, tasks, models and recipes of one domain.

    Args:
        sets: Names of the data sets that `primal data` lists.
        make_task: Builds the task of a recipe from the files in a folder (None: the default one).
        build_model: Builds the model of a recipe for cases of given sizes.
        recipes: By protocol: builds the recipe of (set, model, seed).
        find: Returns where a set is, or None: (set, folder).
        prepare: Writes the prepared file of a set and returns it: (set, folder, out).
        missing: Said of a set that was not found.
        usage: How `primal data` prepares a set, for the listing.
        acts: Whether models are policies, measured by `primal rollout` in an environment.
    """

    sets: Sequence[str]
    make_task: Callable[[Recipe, Path | None], Task]
    build_model: Callable[[Recipe, Sizes], nn.Module] = build_sequence_model
    recipes: Mapping[str, Callable[[str, str, int], Recipe]] = field(default_factory=dict)
    find: Callable[[str, Path | None], Path | None] = _find_none
    prepare: Callable[[str, Path | None, Path | None], Path] | None = None
    missing: str = "not at hand"
    usage: str = ""
    acts: bool = False


class Directions(NamedTuple):
    """Directions s, weight eta of the objective, landmarks a direction."""

    num: int
    eta: float
    samples: int = 10


def with_directions(recipe: Recipe, directions: Directions) -> Recipe:
    """Set the directions of a recipe whose model has Primal layers.

    Layers with a learned time get the number of directions alone: they sample nothing, and no
    weight of their objective has been chosen yet.
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
