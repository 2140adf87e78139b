"""Raw sound: a learnt filterbank makes tokens of samples; recipes are counted in epochs."""

from pathlib import Path
from typing import Any

from primal_attention.models.stacks import mechanism_of
from primal_attention.tasks import Task
from primal_attention.tasks.audio import SOUND_AUGMENTATIONS, SOUNDS, audio_task
from primal_attention.training.domains.domain import Domain
from primal_attention.training.recipe import Recipe, nearest

_OPTIONS: dict[str, dict[str, Any]] = {  # by mechanism
    "primal": {"num_directions": 16, "landmark_jitter": 0.6, "landmark_dropout": 0.5},
    "primal_time": {"num_directions": 16},
}


def audio_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Use one setting for all models, and choose on clips held out of the training ones."""
    recipe = Recipe(
        task=f"audio/{name}",
        model=model,
        protocol="clean",
        seed=seed,
        valid_fraction=0.1,
        num_tokens=8192,
        augment="speech",
        num_layers=1,
        dim=64,
        num_heads=2,
        ffn_dim=128,
        kernel_size=201,
        stride=80,
        num_filters=32,
        norm="pre",
        pooling="mean",
        dropout=0.05,
        attention=_OPTIONS.get(mechanism_of(model), {}),
        optimizer="adamw",
        lr=3e-3,
        weight_decay=0.05,
        batch_size=16,
        epochs=12,
        eval_every=3,
        schedule="one_cycle",
        warmup=0.2,
        clip_norm=1.0,
    )
    if not name.startswith("esc50"):
        return recipe
    return recipe.replace(
        num_tokens=40_000,
        augment="sound",
        stride=16,
        num_layers=4,
        dim=192,
        num_heads=6,
        ffn_dim=768,
        num_filters=64,
        dropout=0.2,
        epochs=100,
        precision="bf16",
    )


def _task(recipe: Recipe, folder: Path | None) -> Task:
    if not recipe.data.valid_fraction:
        raise ValueError(
            f"valid_fraction of {recipe.task} must be in (0, 1): no clips are set apart, "
            f"got {recipe.data.valid_fraction}"
        )
    names = ("none", *SOUND_AUGMENTATIONS)
    if recipe.data.augment not in names:
        raise ValueError(f"augment={recipe.data.augment!r} is of pictures; {nearest('', names)}")
    return audio_task(
        recipe.set_name,
        folder=folder,
        num_samples=recipe.data.num_tokens,
        valid=recipe.data.valid_fraction,
        seed=recipe.run.seed,
        augmentation=SOUND_AUGMENTATIONS.get(recipe.data.augment),
    )


AUDIO = Domain(
    sets=SOUNDS.names,
    make_task=_task,
    recipes={"clean": audio_clean},
    find=SOUNDS.find,
    prepare=SOUNDS.prepare,
    usage="reads a folder of wav files, and prepares it",
)
