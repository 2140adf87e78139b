"""What a picture goes through before a model trains on it, as a batch on its device.

Letters: B pictures, S pixels of a side, K classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from primal_attention.tasks.images.boxes import draw_crops, inside, relative_boxes
from primal_attention.tasks.images.mixing import Mixed, mix, smoothed
from primal_attention.tasks.images.randaugment import rand_augment

_ERASED = ((0.02, 1 / 3), (0.3, 1 / 0.3))


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of DeiT (Touvron et al., 2021), after the random crop.

    Attributes:
        operations: Of RandAugment, on each picture.
        magnitude: Of these operations.
        erasing: Probability that a box of a picture becomes noise.
        mixing: Parameters of mixup and CutMix, between which a coin is tossed; None mixes nothing.
        smoothing: Of the labels.
    """

    operations: int = 2
    magnitude: float = 9.0
    erasing: float = 0.25
    mixing: tuple[float, float] | None = (0.8, 1.0)
    smoothing: float = 0.1

    def __call__(self, x: Tensor, labels: Tensor, num_classes: int) -> Mixed:
        """Pictures [B, 3, S, S], 0 to 255, and probabilities [B, K] of their classes."""
        x = flip(x)
        for _ in range(self.operations):
            x = rand_augment(x, self.magnitude)
        x = erase(x, self.erasing)
        mixed = Mixed(x, smoothed(labels, num_classes, self.smoothing))
        return mixed if self.mixing is None else mix(*mixed, *self.mixing)


AUGMENTATIONS: dict[str, Augmentation | None] = {
    "none": None,
    "light": Augmentation(operations=0, erasing=0.0, mixing=None),  # crops and mirrors alone
    "deit": Augmentation(),
}


def flip(x: Tensor) -> Tensor:
    """Half of the pictures mirrored."""
    mirrored = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    return torch.where(mirrored, x.flip(-1), x)


def erase(x: Tensor, probability: float) -> Tensor:
    """Some of the pictures with noise in a box, of the mean and spread of all of them."""
    boxes = relative_boxes(draw_crops(len(x), x.device, *_ERASED))
    erased = torch.rand(len(x), 1, 1, 1, device=x.device) < probability
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    noise = (mean + std * torch.randn_like(x)).clamp(0, 255)
    return torch.where(erased & inside(boxes, x.shape[-1]), noise, x)
