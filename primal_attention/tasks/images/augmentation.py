"""Augment a batch of pictures on its device, without synchronising.

RandAugment (Cubuk et al., 2019) does what Pillow's operations do, with strengths as in timm's
``rand-m9-mstd0.5-inc1``: of fifteen operations one is drawn for each picture and left undone half
of the time; all are computed for all pictures. Two pictures are mixed by mixup (Zhang et al., 2018)
or CutMix (Yun et al., 2019).

Letters: B pictures, S pixels of a side, K classes. Pixels are 0 to 255.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Beta

LARGEST = 10.0  # level of RandAugment
_GREY = (0.299, 0.587, 0.114)
_ERASED = ((0.02, 1 / 3), (0.3, 1 / 0.3))
Range = tuple[float, float]
CROPPED: tuple[Range, Range] = ((0.08, 1.0), (3 / 4, 4 / 3))
"""Areas, as parts of a picture, and ratios of width to height."""


def draw_crops(
    count: int, device: torch.device, areas: Range = CROPPED[0], ratios: Range = CROPPED[1]
) -> Tensor:
    """Draw area, ratio and place (along, down) of a box in each picture, [B, 4].

    Areas are uniform, ratios uniform in their logarithm, places uniform where the box fits.
    """
    area, ratio, along, down = torch.rand(4, count, device=device)
    low, high = (math.log(each) for each in ratios)
    area = areas[0] + (areas[1] - areas[0]) * area
    return torch.stack([area, (low + (high - low) * ratio).exp(), along, down], dim=-1)


def relative_boxes(crops: Tensor) -> Tensor:
    """Convert to left, top, width and height [B, 4], clamped to a square picture of side 1."""
    area, ratio, along, down = crops.unbind(-1)
    wide, high = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    return torch.stack([along * (1 - wide), down * (1 - high), wide, high], dim=-1)


def crop(x: Tensor, crops: Tensor) -> Tensor:
    """Scale what lies in the boxes of pictures [B, 3, S, S] to their size by cubic splines."""
    left, top, wide, high = relative_boxes(crops).unbind(-1)
    nothing = torch.zeros_like(left)
    rows = [wide, nothing, 2 * left + wide - 1, nothing, high, 2 * top + high - 1]
    return warp(x, torch.stack(rows, dim=-1), mode="bicubic", padding_mode="border")


def warp(x: Tensor, matrices: Tensor, *, mode: str, padding_mode: str = "zeros") -> Tensor:
    """Sample pictures [B, 3, S, S] at an affine map [B, 6] of their places, -1 to 1."""
    grid = F.affine_grid(matrices.view(-1, 2, 3), list(x.shape), align_corners=False)
    found = F.grid_sample(x, grid, mode=mode, padding_mode=padding_mode, align_corners=False)
    return found.clamp(0, 255) if mode == "bicubic" else found


def inside(boxes: Tensor, size: int) -> Tensor:
    """Mark the pixels in boxes [B, 4] (left, top, width, height), bool [B, 1, S, S]."""
    left, top, wide, high = boxes[..., None].unbind(-2)  # [B, 1] each
    places = (torch.arange(size, device=boxes.device) + 0.5) / size
    across = (places >= left) & (places < left + wide)
    downward = (places >= top) & (places < top + high)
    return (downward[:, :, None] & across[:, None, :])[:, None]


def rand_augment(x: Tensor, magnitude: float, spread: float = 0.5) -> Tensor:
    """Apply one random operation to each of the pictures [B, 3, S, S].

    Args:
        x: The pictures.
        magnitude: Mean level, 0 to 10.
        spread: Standard deviation of the level.
    """
    count = len(x)
    level = (magnitude + spread * torch.randn(count, device=x.device)).clamp(0, LARGEST) / LARGEST
    sign = torch.randint(2, (count,), device=x.device) * 2.0 - 1
    which = torch.randint(len(NAMES), (count,), device=x.device)
    done = torch.rand(count, device=x.device) < 0.5
    return apply(x, torch.where(done, which, -1), level, sign)


def apply(x: Tensor, which: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Apply to each picture the operation of its number [B] in ``NAMES``; -1 is none.

    Args:
        x: The pictures.
        which: The operations.
        level: Their strength [B], 0 to 1.
        sign: Their direction [B], 1 or -1.
    """
    columns = [each[:, None, None, None] for each in (which, level, sign)]
    result = x
    for number, change in enumerate(_COLOURS.values()):
        result = torch.where(columns[0] == number, change(x, *columns[1:]), result)
    moved = _moved(x, [which == len(_COLOURS) + i for i in range(len(_MOVES))], level * sign)
    return torch.where(columns[0] >= len(_COLOURS), moved, result)


def _auto_contrast(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) * 255 / (high - low).clamp(min=1e-6), x)


def _equalize(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Map each channel so that its values are spread evenly."""
    values = x.round().long().clamp(0, 255).flatten(2)  # [B, 3, S * S]
    counts = values.new_zeros(*values.shape[:2], 256)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, values), values).view(x.shape).to(x.dtype)


def _posterize(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Keep the upper 4 bits or fewer."""
    width = 2 ** (4 + (level * 4).floor())
    return (x / width).floor() * width


def _blended(without: Tensor, x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Move away from a picture without some quality, or towards it."""
    factor = (1 + sign * level * 0.9).clamp(min=0.1)
    return (without + factor * (x - without)).clamp(0, 255)


def _grey(x: Tensor) -> Tensor:
    red, green, blue = x.unbind(1)
    return (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue)[:, None]


def _sharpness(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    smooth = x.clone()  # at the edges
    smooth[..., 1:-1, 1:-1] = (9 * F.avg_pool2d(x, 3, stride=1) + 4 * x[..., 1:-1, 1:-1]) / 13
    return _blended(smooth, x, level, sign)


def _moved(x: Tensor, chosen: list[Tensor], amount: Tensor) -> Tensor:
    """Turn, shear or shift pictures; the outside has the mean colour."""
    turn, shear_x, shear_y, shift_x, shift_y = (
        torch.where(each, most * amount, 0.0)
        for each, most in zip(chosen, _MOVES.values(), strict=True)
    )
    cos, sin = turn.cos(), turn.sin()
    matrices = torch.stack([cos, shear_x - sin, shift_x, sin + shear_y, cos, shift_y], dim=-1)
    mean = x.mean((0, 2, 3), keepdim=True)
    return warp(x - mean, matrices, mode="bilinear") + mean


_COLOURS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "invert": lambda x, level, sign: 255 - x,
    "posterize": _posterize,
    "solarize": lambda x, level, sign: torch.where(x >= 256 - (level * 256).floor(), 255 - x, x),
    "solarize_add": lambda x, level, sign: torch.where(
        x < 128, (x + (level * 110).floor()).clamp(max=255), x
    ),
    "colour": lambda x, *strength: _blended(_grey(x), x, *strength),
    "contrast": lambda x, *strength: _blended(
        _grey(x).mean((2, 3), keepdim=True).round(), x, *strength
    ),
    "brightness": lambda x, *strength: _blended(torch.zeros_like(x), x, *strength),
    "sharpness": _sharpness,
}
_MOVES: dict[str, float] = {  # at the largest level; shifts as on an axis from -1 to 1
    "rotate": math.pi / 6,
    "shear_x": 0.3,
    "shear_y": 0.3,
    "shift_x": 0.9,
    "shift_y": 0.9,
}
NAMES = (*_COLOURS, *_MOVES)


class Mixed(NamedTuple):
    """Pictures and how much of each class is in them."""

    x: Tensor  # [B, 3, S, S]
    target: Tensor  # [B, K]


def smoothed(labels: Tensor, num_classes: int, smoothing: float) -> Tensor:
    """Smooth labels [B] to probabilities [B, K]."""
    certain = labels[:, None] == torch.arange(num_classes, device=labels.device)
    return (1 - smoothing) * certain + smoothing / num_classes


def mix(x: Tensor, target: Tensor, mixup: float, cutmix: float) -> Mixed:
    """Blend each picture with that on the other side of the batch, or paste one into the other.

    The choice and the amount are drawn once for the batch.

    Args:
        x: The pictures [B, 3, S, S].
        target: Their classes [B, K].
        mixup: Both parameters of the Beta distribution of the part that stays, where they blend.
        cutmix: The same where one is pasted.
    """
    other, pasting = x.flip(0), torch.rand((), device=x.device) < 0.5
    part = _beta(mixup, x)
    blended = part * x + (1 - part) * other
    box = inside(_box(_beta(cutmix, x)), x.shape[-1])
    pasted = torch.where(box, other, x)
    kept = torch.where(pasting, 1 - box.to(x.dtype).mean(), part)
    return Mixed(torch.where(pasting, pasted, blended), kept * target + (1 - kept) * target.flip(0))


def _beta(parameter: float, x: Tensor) -> Tensor:
    both = torch.full((), parameter, device=x.device)
    return Beta(both, both, validate_args=False).sample()


def _box(kept: Tensor) -> Tensor:
    """Draw a square of the area that is not kept, cut off at the edges, [1, 4]."""
    half, place = (1 - kept).sqrt() / 2, torch.rand(2, device=kept.device)
    low, high = (place - half).clamp(min=0), (place + half).clamp(max=1)
    return torch.cat([low, high - low])[None]


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
        """Augment pictures [B, 3, S, S], 0 to 255, and return class probabilities [B, K]."""
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
    """Mirror half of the pictures."""
    mirrored = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    return torch.where(mirrored, x.flip(-1), x)


def erase(x: Tensor, probability: float) -> Tensor:
    """Fill a box of some of the pictures with noise of the batch's mean and spread."""
    boxes = relative_boxes(draw_crops(len(x), x.device, *_ERASED))
    erased = torch.rand(len(x), 1, 1, 1, device=x.device) < probability
    mean, std = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    noise = (mean + std * torch.randn_like(x)).clamp(0, 255)
    return torch.where(erased & inside(boxes, x.shape[-1]), noise, x)
