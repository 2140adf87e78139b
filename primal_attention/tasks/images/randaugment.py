"""RandAugment (Cubuk et al., 2019) for a whole batch at once, on its device.

Of fifteen operations one is drawn for each picture, and left undone half of the time. All are
computed for all pictures, so that nothing waits for the device. What they do is what Pillow's do;
strengths grow with the level, as in timm's ``rand-m9-mstd0.5-inc1``.

Letters: B pictures, S pixels of a side. Pixels are 0 to 255.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.tasks.images.boxes import warp

LARGEST = 10.0  # level
_GREY = (0.299, 0.587, 0.114)


def rand_augment(x: Tensor, magnitude: float, spread: float = 0.5) -> Tensor:
    """One operation on each of the pictures [B, 3, S, S].

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
    """The operation of each picture, by its number [B] in ``NAMES``; -1 is none.

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
    """Each channel mapped so that its values are spread evenly."""
    values = x.round().long().clamp(0, 255).flatten(2)  # [B, 3, S * S]
    counts = values.new_zeros(*values.shape[:2], 256)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, values), values).view(x.shape).to(x.dtype)


def _invert(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return 255 - x


def _posterize(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """The upper 4 bits and fewer."""
    width = 2 ** (4 + (level * 4).floor())
    return (x / width).floor() * width


def _solarize(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return torch.where(x >= 256 - (level * 256).floor(), 255 - x, x)


def _solarize_add(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return torch.where(x < 128, (x + (level * 110).floor()).clamp(max=255), x)


def _blended(without: Tensor, x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Away from a picture without some quality, or towards it."""
    factor = (1 + sign * level * 0.9).clamp(min=0.1)
    return (without + factor * (x - without)).clamp(0, 255)


def _grey(x: Tensor) -> Tensor:
    red, green, blue = x.unbind(1)
    return (_GREY[0] * red + _GREY[1] * green + _GREY[2] * blue)[:, None]


def _colour(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blended(_grey(x), x, level, sign)


def _contrast(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blended(_grey(x).mean((2, 3), keepdim=True).round(), x, level, sign)


def _brightness(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return _blended(torch.zeros_like(x), x, level, sign)


def _sharpness(x: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    smooth = x.clone()  # at the edges
    smooth[..., 1:-1, 1:-1] = (9 * F.avg_pool2d(x, 3, stride=1) + 4 * x[..., 1:-1, 1:-1]) / 13
    return _blended(smooth, x, level, sign)


def _moved(x: Tensor, chosen: list[Tensor], amount: Tensor) -> Tensor:
    """Pictures turned, sheared or shifted; what comes in from outside has the mean colour."""
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
    "invert": _invert,
    "posterize": _posterize,
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "colour": _colour,
    "contrast": _contrast,
    "brightness": _brightness,
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
