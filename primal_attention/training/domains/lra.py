"""The Long Range Arena; its recipes are counted in steps."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from primal_attention.models.stacks import mechanism_of
from primal_attention.tasks import Task, lra
from primal_attention.training.domains.domain import Directions, Domain, with_directions
from primal_attention.training.recipe import Recipe, nearest

#   Settings of length and batches by task, from the authors' scripts.
SCHEDULES: dict[str, dict[str, Any]] = {
    "listops": {"steps": 5_000, "batch_size": 32, "warmup": 1_000 / 5_000, "eval_every": 50},
    "text": {"steps": 20_000, "batch_size": 32, "warmup": 8_000 / 20_000, "eval_every": 500},
    "retrieval": {"steps": 30_000, "batch_size": 32, "warmup": 800 / 30_000, "eval_every": 300},
    "image": {"steps": 35_000, "batch_size": 256, "warmup": 175 / 35_000, "eval_every": 175},
    "pathfinder": {"steps": 62_400, "batch_size": 256, "warmup": 312 / 62_400, "eval_every": 312},
}
RELEASED: dict[str, dict[str, Directions]] = {
    "primalformer": {
        "listops": Directions(20, 0.1),
        "text": Directions(20, 0.05),
        "retrieval": Directions(30, 0.0),
        "image": Directions(30, 0.1),
        "pathfinder": Directions(30, 0.1),
    },
    "primal_plus": {
        "listops": Directions(30, 0.05),
        "text": Directions(30, 0.1),
        "retrieval": Directions(20, 0.05),
        "image": Directions(30, 0.1),
        "pathfinder": Directions(20, 0.05),
    },
}
CLEAN = Directions(30, 0.1)  # set before any run, for all tasks alike
_OPTIONS: dict[str, Mapping[str, Any]] = {  # where the paper has others than our defaults
    "performer": {"num_features": 256},
    "nystrom": {"num_landmarks": 128, "conv_kernel_size": 35},
}


def lra_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """Train as the authors did: padding is pooled, and leaks into Primal layers."""
    directions = RELEASED.get(model, {}).get(_like(name), CLEAN)
    recipe = _recipe(name, model, "paper", seed, directions)
    return recipe.replace(mask_primal=mechanism_of(model) != "primal")


def lra_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Mask padding everywhere, and use one setting for all tasks."""
    return _recipe(name, model, "clean", seed, CLEAN)


def _recipe(name: str, model: str, protocol: str, seed: int, directions: Directions) -> Recipe:
    rules = lra.LRA_PROTOCOLS[protocol]
    recipe = Recipe(
        task=f"lra/{name}",
        model=model,
        protocol=protocol,
        seed=seed,
        valid_fraction=_held_out(name, protocol),
        num_towers=2 if _like(name) == "retrieval" else 1,
        dim=64,
        num_heads=2,
        ffn_dim=128,
        norm="pre",
        pooling="padded_mean" if rules.pool_over_padding else "mean",
        head_hidden_dim=128,
        attention=_OPTIONS.get(model, {}),
        objective="released_batch",
        optimizer="adamw",
        lr=1e-4,
        adam_eps=1e-6,
        schedule="one_cycle",
        clip_norm=None,
        precision="bf16",
        **SCHEDULES[_like(name)],
    )
    return with_directions(recipe, directions)


def _like(name: str) -> str:
    """Return the task of the paper whose settings a task has."""
    if name not in lra.LRA_TASKS:
        raise ValueError(f"no task of lra is called {name!r}; {nearest(name, lra.LRA_TASKS)}")
    if name in lra.PATHFINDERS:
        return "pathfinder"
    return name.removesuffix("-imdb")


def _held_out(name: str, protocol: str) -> float | None:
    """Return the part of the training cases that validates; only Text has no cases for that."""
    if name != "text":
        return 0.0
    return None if lra.LRA_PROTOCOLS[protocol].text_validates_on_test else lra.HELD_OUT


def _task(recipe: Recipe, folder: Path | None) -> Task:
    name = recipe.set_name
    text = None if recipe.run.protocol == "paper" else lra.HELD_OUT
    wanted = text if name == "text" else 0
    if recipe.data.valid_fraction != wanted:
        raise ValueError(
            f"valid_fraction of lra/{name} is {wanted} under the {recipe.run.protocol} protocol, "
            f"got {recipe.data.valid_fraction}"
        )
    return lra.lra_task(name, folder=folder, protocol=recipe.run.protocol, seed=recipe.run.seed)


LRA = Domain(
    sets=lra.LRA_TASKS,
    make_task=_task,
    recipes={"paper": lra_paper, "clean": lra_clean},
    find=lra.find_lra,
    prepare=partial(lra.prepare_lra, workers=os.cpu_count() or 1),
    usage="reads or generates a task, and prepares it",
)
