"""Images: folders of pictures, prepared files, augmentation on the device, vision transformers."""

from primal_attention.tasks.images.augmentation import AUGMENTATIONS, Augmentation
from primal_attention.tasks.images.folders import (
    IMAGE_SETS,
    IMAGENET_100,
    find_images,
    load_images,
    read_folder,
)
from primal_attention.tasks.images.task import images_task

__all__ = [
    "AUGMENTATIONS",
    "IMAGENET_100",
    "IMAGE_SETS",
    "Augmentation",
    "find_images",
    "images_task",
    "load_images",
    "read_folder",
]
