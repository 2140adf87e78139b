"""The task domains: one file each, one line each in ``DOMAINS``."""

from pathlib import Path

from primal_attention.models.stacks import MODELS
from primal_attention.tasks import Task
from primal_attention.training.domains.audio import AUDIO
from primal_attention.training.domains.domain import Domain
from primal_attention.training.domains.images import IMAGES
from primal_attention.training.domains.language import LANGUAGE
from primal_attention.training.domains.lra import LRA
from primal_attention.training.domains.recall import RECALL
from primal_attention.training.domains.rl import RL
from primal_attention.training.domains.uea import UEA
from primal_attention.training.recipe import Recipe, nearest

#   A program with a domain of its own adds it here.
DOMAINS: dict[str, Domain] = {
    "uea": UEA,
    "lra": LRA,
    "language": LANGUAGE,
    "recall": RECALL,
    "rl": RL,
    "images": IMAGES,
    "audio": AUDIO,
}


def find_domain(name: str) -> Domain:
    """Return a registered domain by its name."""
    if name not in DOMAINS:
        raise ValueError(f"no domain is called {name!r}; {nearest(name, DOMAINS)}")
    return DOMAINS[name]


def find_recipe(task: str, model: str, protocol: str, seed: int = 0) -> Recipe:
    """Return the named recipe of a task such as ``uea/JapaneseVowels`` or ``lra/listops``."""
    domain, _, name = task.partition("/")
    if not name:
        raise ValueError(f"a task is domain/set, for instance uea/JapaneseVowels, got {task!r}")
    recipes = find_domain(domain).recipes
    if protocol not in recipes:
        raise ValueError(f"no protocol is called {protocol!r}; {nearest(protocol, recipes)}")
    if model not in MODELS:
        raise ValueError(f"no model is called {model!r}; {nearest(model, MODELS)}")
    return recipes[protocol](name, model, seed)


def acts(recipe: Recipe) -> bool:
    """Return whether the model of a recipe is a policy, which acts in an environment."""
    return recipe.domain in DOMAINS and DOMAINS[recipe.domain].acts


def task_of(recipe: Recipe, folder: Path | None = None) -> Task:
    """Build the task of a recipe: its cases, split as the recipe says.

    Args:
        recipe: Its task is domain/set.
        folder: Folder of the domain's data; default: see ``load_uea``, ``load_lra``,
            ``load_language`` and ``load_images``.
    """
    return find_domain(recipe.domain).make_task(recipe, folder)
