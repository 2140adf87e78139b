"""Pictures: DeiT (Touvron et al., 2021); recipes are counted in epochs."""

from pathlib import Path
from typing import NamedTuple

from primal_attention.models.vision import PictureClassifier, build_pictures
from primal_attention.tasks import (
    IMAGE_SETS,
    Sizes,
    Task,
    find_images,
    images_task,
)
from primal_attention.tasks.images.augmentation import AUGMENTATIONS
from primal_attention.training.domains.domain import Directions, Domain, with_directions
from primal_attention.training.recipe import Recipe, nearest

DIRECTIONS = Directions(96, 0.05)
RATE, PER = 5e-4, 512  # the learning rate of a batch of so many pictures
WARMUP = 5  # epochs


class ImageSetup(NamedTuple):
    """The network of a set and how long it is trained."""

    image_size: int
    patch_size: int
    dim: int  # with heads of dimension 64: DeiT-Ti has 192, DeiT-S 384
    batch_size: int
    epochs: int


DEIT_S = ImageSetup(224, 16, 384, 1024, 300)  # the paper's, and that of any other set
#   Ours, set before any run: the paper has no model of these sets, of pictures of 64 pixels.
TINY = ImageSetup(64, 8, 192, 512, 100)
SCHEDULES: dict[str, ImageSetup] = {"tiny-imagenet-100": TINY, "tiny-imagenet-200": TINY}


def images_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """Train as the authors did: the best epoch on the test pictures is reported."""
    schedule = SCHEDULES.get(name, DEIT_S)
    recipe = Recipe(
        task=f"images/{name}",
        model=model,
        protocol="paper",
        seed=seed,
        valid_fraction=None,
        augment="deit",
        num_layers=12,
        num_heads=schedule.dim // 64,
        ffn_dim=4 * schedule.dim,
        norm="pre",
        pooling="class_token",
        dropout=0.0,
        drop_path=0.1,
        objective="released_batch",
        optimizer="adamw",
        lr=RATE * schedule.batch_size / PER,
        weight_decay=0.05,
        schedule="cosine",
        warmup=WARMUP / schedule.epochs,
        clip_norm=None,
        precision="bf16",
        **schedule._asdict(),
    )
    return with_directions(recipe, DIRECTIONS)


def images_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Choose on a tenth of the training pictures, held out by class."""
    return images_paper(name, model, seed).replace(protocol="clean", valid_fraction=0.1)


def _task(recipe: Recipe, folder: Path | None) -> Task:
    if recipe.data.valid_fraction == 0:
        raise ValueError(
            f"valid_fraction of {recipe.task} must be in (0, 1) or none: no pictures are set apart"
        )
    if recipe.data.augment not in AUGMENTATIONS:
        raise ValueError(
            f"augment={recipe.data.augment!r} is of sounds; {nearest('', AUGMENTATIONS)}"
        )
    return images_task(
        recipe.set_name,
        folder=folder,
        image_size=recipe.data.image_size,
        patch_size=recipe.data.patch_size,
        valid=recipe.data.valid_fraction or "test",
        seed=recipe.run.seed,
        augmentation=AUGMENTATIONS[recipe.data.augment],
    )


def _model(recipe: Recipe, sizes: Sizes) -> PictureClassifier:
    if sizes.mean is None or sizes.std is None:
        raise ValueError("a model of pictures standardises them; the sizes have no mean and std")
    names = ("dim", "num_layers", "num_heads", "ffn_dim")
    shape = {name: getattr(recipe.model, name) for name in names}
    shape |= {"image_size": recipe.data.image_size, "patch_size": recipe.data.patch_size}
    return build_pictures(
        recipe.model.name,
        num_classes=sizes.num_outputs,
        statistics=(sizes.mean, sizes.std),
        sizes=shape,
        pooling=recipe.model.pooling,
        dropout=recipe.model.dropout,
        drop_path=recipe.model.drop_path,
        options=recipe.model.attention,
    )


IMAGES = Domain(
    sets=IMAGE_SETS,
    make_task=_task,
    build_model=_model,
    recipes={"paper": images_paper, "clean": images_clean},
    find=find_images,
)
