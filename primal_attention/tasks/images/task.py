"""Folders of pictures as tasks: which class is it?"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from primal_attention.models.vision import num_tokens
from primal_attention.tasks.images.augmentation import Augmentation
from primal_attention.tasks.images.cases import PictureCases, picture_cases
from primal_attention.tasks.images.folders import load_images
from primal_attention.tasks.splits import stratified_split
from primal_attention.tasks.task import CLASSIFICATION, Sizes, Task

RESIDENT = 2**33  # bytes of decoded pictures that are kept; more are decoded when asked for
_LOOKED_AT = 2**12  # pictures whose statistics stand for all where they are not kept


def images_task(
    name: str,
    *,
    folder: Path | None = None,
    image_size: int = 224,
    patch_size: int = 16,
    valid: float | Literal["test"] = 0.1,
    seed: int = 0,
    augmentation: Augmentation | None = None,
) -> Task:
    """Make a task of a set; a model is called with ``pictures`` uint8 [B, 3, S, S].

    Args:
        name: One of ``IMAGE_SETS``, or any set whose folder is there; see ``load_images``.
        folder: Of the data.
        image_size: Pixels S of a side; pictures are scaled to it.
        patch_size: Pixels of a side of a token.
        valid: The part of the training pictures of each class that is held out, or ``"test"``:
            the test pictures select.
        seed: Of the choice of those held out.
        augmentation: What the training pictures go through.
    """
    found = load_images(name, folder)
    size = 3 * image_size**2 * (len(found.train) + len(found.test))
    cases = partial(
        picture_cases, size=image_size, num_classes=len(found.classes), resident=size <= RESIDENT
    )
    test = cases(found.test, range(len(found.test)))
    if valid == "test":
        train, validated = cases(found.train, range(len(found.train))), test
    else:
        parts = stratified_split(found.train.labels, valid, seed)
        train, validated = (cases(found.train, each.tolist()) for each in parts)
    mean, std = _statistics(train)
    return Task(
        f"images/{name}",
        CLASSIFICATION,
        Sizes(num_tokens(image_size, patch_size), len(found.classes), 3, mean=mean, std=std),
        replace(train, augmentation=augmentation),
        validated,
        test,
        found.classes,
    )


def _statistics(cases: PictureCases) -> tuple[list[float], list[float]]:
    """Compute mean and standard deviation of each channel, of pixels from 0 to 1."""
    looked_at = len(cases) if cases.resident else min(len(cases), _LOOKED_AT)
    places = torch.linspace(0, len(cases) - 1, looked_at).long()
    counts = torch.zeros(3, 256, dtype=torch.int64)
    for indices in torch.split(places, 1024):
        channels = cases[indices].inputs["pictures"].transpose(0, 1).flatten(1)
        counts += torch.stack([torch.bincount(each, minlength=256) for each in channels])
    parts = counts.double() / counts.sum(1, keepdim=True)
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = parts @ values
    std = (parts @ values.square() - mean.square()).clamp(min=1e-6).sqrt()
    return mean.tolist(), std.tolist()
