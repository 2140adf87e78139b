"""The named recipes: one function for each domain and protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from primal_attention.models.stacks import MODELS, mechanism_of
from primal_attention.training.recipe import PROTOCOLS, Recipe, nearest

#   Directions s, weight eta and landmarks a direction that the authors' scripts have for each set.
_RELEASED: dict[str, dict[str, tuple[int, float, int]]] = {
    "primalformer": {
        "EthanolConcentration": (30, 0.1, 10),
        "FaceDetection": (20, 0.1, 5),
        "Handwriting": (30, 0.2, 5),
        "Heartbeat": (30, 0.5, 10),
        "JapaneseVowels": (40, 0.5, 5),
        "PEMS-SF": (40, 0.1, 5),
        "SelfRegulationSCP1": (30, 0.5, 10),
        "SelfRegulationSCP2": (20, 0.0, 10),
        "SpokenArabicDigits": (20, 0.1, 5),
        "UWaveGestureLibrary": (20, 0.0, 10),
    },
    "primal_plus": {
        "EthanolConcentration": (40, 0.2, 10),
        "FaceDetection": (40, 0.2, 5),
        "Handwriting": (20, 0.5, 5),
        "Heartbeat": (40, 0.5, 10),
        "JapaneseVowels": (30, 0.2, 5),
        "PEMS-SF": (40, 0.0, 5),
        "SelfRegulationSCP1": (30, 0.2, 10),
        "SelfRegulationSCP2": (20, 0.2, 10),
        "SpokenArabicDigits": (30, 0.2, 5),
        "UWaveGestureLibrary": (40, 0.1, 10),
    },
}
_OTHER_SETS = (30, 0.1, 10)  # of the paper's grid; set before any run, for all sets alike


def uea_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """Time series as the authors trained them: the best epoch on the test cases is reported."""
    recipe = Recipe(
        task=f"uea/{name}",
        model=model,
        protocol="paper",
        seed=seed,
        valid_fraction=None,
        pooling="flatten",
        mask_attention=False,
        optimizer="adam" if name == "SpokenArabicDigits" else "radam",
        epochs=400 if name == "PEMS-SF" else 100,
        eval_every=2,
    )
    return _with_directions(recipe, _RELEASED.get(model, {}).get(name, _OTHER_SETS))


def uea_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """The same network, one setting for all sets, chosen on cases held out of the training ones."""
    recipe = Recipe(
        task=f"uea/{name}",
        model=model,
        protocol="clean",
        seed=seed,
        pooling="flatten",
        epochs=100,
        patience=30,
    )
    return _with_directions(recipe, _OTHER_SETS)


def _with_directions(recipe: Recipe, released: tuple[int, float, int]) -> Recipe:
    if mechanism_of(recipe.model) != "primal":
        return recipe
    directions, eta, samples = released
    options = {"num_directions": directions, "samples_per_direction": samples}
    return replace(recipe, eta=eta, attention=options)


RECIPES: dict[tuple[str, str], Callable[[str, str, int], Recipe]] = {
    ("uea", "paper"): uea_paper,
    ("uea", "clean"): uea_clean,
}
DOMAINS = tuple(dict.fromkeys(domain for domain, _ in RECIPES))


def find_recipe(task: str, model: str, protocol: str, seed: int = 0) -> Recipe:
    """The recipe of a task such as ``uea/JapaneseVowels``."""
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
