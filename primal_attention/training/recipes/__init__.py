"""The named recipes: one file for each domain, one function for each protocol."""

from collections.abc import Callable

from primal_attention.models.stacks import MODELS
from primal_attention.training.recipe import PROTOCOLS, Recipe, nearest
from primal_attention.training.recipes.images import images_clean, images_paper
from primal_attention.training.recipes.language import language_clean, language_paper
from primal_attention.training.recipes.lra import lra_clean, lra_paper
from primal_attention.training.recipes.rl import rl_clean, rl_paper
from primal_attention.training.recipes.uea import uea_clean, uea_paper

RECIPES: dict[tuple[str, str], Callable[[str, str, int], Recipe]] = {
    ("uea", "paper"): uea_paper,
    ("uea", "clean"): uea_clean,
    ("lra", "paper"): lra_paper,
    ("lra", "clean"): lra_clean,
    ("language", "paper"): language_paper,
    ("language", "clean"): language_clean,
    ("rl", "paper"): rl_paper,
    ("rl", "clean"): rl_clean,
    ("images", "paper"): images_paper,
    ("images", "clean"): images_clean,
}
DOMAINS = tuple(dict.fromkeys(domain for domain, _ in RECIPES))


def find_recipe(task: str, model: str, protocol: str, seed: int = 0) -> Recipe:
    """The recipe of a task such as ``uea/JapaneseVowels`` or ``lra/listops``."""
    domain, slash, name = task.partition("/")
    if not slash or not name:
        raise ValueError(f"a task is domain/set, for instance uea/JapaneseVowels, got {task!r}")
    if domain not in DOMAINS:
        raise ValueError(f"no domain is called {domain!r}; {nearest(domain, DOMAINS)}")
    if protocol not in PROTOCOLS:
        raise ValueError(f"no protocol is called {protocol!r}; {nearest(protocol, PROTOCOLS)}")
    if model not in MODELS:
        raise ValueError(f"no model is called {model!r}; {nearest(model, MODELS)}")
    return RECIPES[domain, protocol](name, model, seed)
