"""The task that a recipe is about, from the data at hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from primal_attention.tasks import Task, images_task, language_task, lra_task, rl_task, uea_task
from primal_attention.tasks.images.augmentation import AUGMENTATIONS
from primal_attention.tasks.lra.task import HELD_OUT
from primal_attention.tasks.offline_rl.windows import TOKENS_PER_STEP
from primal_attention.training.recipe import Recipe, nearest


def task_of(recipe: Recipe, folder: Path | None = None) -> Task:
    """The cases of a recipe, split as it says.

    Args:
        recipe: Its task is domain/set.
        folder: Of the data of that domain; see ``load_uea``, ``load_lra``, ``load_language``
            and ``load_images`` for the default.
    """
    domain, _, name = recipe.task.partition("/")
    if domain not in _TASKS:
        raise ValueError(f"no domain is called {domain!r}; {nearest(domain, _TASKS)}")
    return _TASKS[domain](name, recipe, folder)


def _uea(name: str, recipe: Recipe, folder: Path | None) -> Task:
    if recipe.valid_fraction == 0:
        raise ValueError("valid_fraction must be in (0, 1) or none: UEA has no validation cases")
    valid: float | Literal["test"] = recipe.valid_fraction or "test"
    return uea_task(name, folder=folder, valid=valid, seed=recipe.seed)


def _lra(name: str, recipe: Recipe, folder: Path | None) -> Task:
    text = None if recipe.protocol == "paper" else HELD_OUT
    wanted = text if name == "text" else 0
    if recipe.valid_fraction != wanted:
        raise ValueError(
            f"valid_fraction of lra/{name} is {wanted} under the {recipe.protocol} protocol, "
            f"got {recipe.valid_fraction}"
        )
    return lra_task(name, folder=folder, protocol=recipe.protocol, seed=recipe.seed)


def _language(name: str, recipe: Recipe, folder: Path | None) -> Task:
    if recipe.valid_fraction != 0:
        raise ValueError(
            f"valid_fraction of {recipe.task} is 0: texts have a part to validate on, "
            f"got {recipe.valid_fraction}"
        )
    return language_task(
        name,
        folder=folder,
        num_tokens=recipe.num_tokens,
        context_tokens=recipe.context_tokens,
    )


def _rl(name: str, recipe: Recipe, folder: Path | None) -> Task:
    if not recipe.valid_fraction or recipe.num_tokens % TOKENS_PER_STEP:
        raise ValueError(
            f"valid_fraction of {recipe.task} must be in (0, 1), and num_tokens a multiple of "
            f"{TOKENS_PER_STEP}, got {recipe.valid_fraction} and {recipe.num_tokens}"
        )
    context = recipe.num_tokens // TOKENS_PER_STEP
    valid, seed = recipe.valid_fraction, recipe.seed
    return rl_task(name, folder=folder, context=context, valid=valid, seed=seed)


def _images(name: str, recipe: Recipe, folder: Path | None) -> Task:
    if recipe.valid_fraction == 0:
        raise ValueError(
            f"valid_fraction of {recipe.task} must be in (0, 1) or none: no pictures are set apart"
        )
    return images_task(
        name,
        folder=folder,
        image_size=recipe.image_size,
        patch_size=recipe.patch_size,
        valid=recipe.valid_fraction or "test",
        seed=recipe.seed,
        augmentation=AUGMENTATIONS[recipe.augment],
    )


_TASKS: dict[str, Callable[[str, Recipe, Path | None], Task]] = {
    "uea": _uea,
    "lra": _lra,
    "language": _language,
    "rl": _rl,
    "images": _images,
}
