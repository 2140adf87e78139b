"""From the bytes of a file to pixels.

Letters: B pictures, S pixels of a side.
"""

import io
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primal_attention.foreign_files import reading
from primal_attention.tasks.images.boxes import relative_boxes
from primal_attention.tasks.images.folders import Encoded

FORMATS = ("JPEG", "PNG", "WEBP")
MOST_PIXELS = 2**26  # of a picture; the largest of ImageNet has 61 million
_SHARE = 32  # pictures that a thread takes at a time


def decoded(
    encoded: Encoded,
    places: Iterable[int],
    size: int,
    *,
    centre: float = 1.0,
    crops: Tensor | None = None,
) -> Tensor:
    """Pictures as uint8 [B, 3, S, S], in colour whatever they were.

    Args:
        encoded: The files.
        places: Which of them.
        size: S. Of each picture the square at its centre is scaled to it, or the crop.
        centre: The side of that square, as a part of the shorter side of the picture.
        crops: What to cut out in its place, [B, 4], see ``draw_crops``.
    """
    places = list(places)
    pixels = np.empty((len(places), size, size, 3), dtype=np.uint8)
    scaling = _pillow().Resampling.BICUBIC

    def decode(row: int) -> None:
        image = _opened(encoded, places[row])
        crop = None if crops is None else crops[row]
        box = _central(image.size, centre) if crop is None else _cropped(image.size, crop)
        pixels[row] = np.asarray(image.resize((size, size), scaling, box=box))

    _in_threads(decode, len(places))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def check_pictures(encoded: Encoded) -> None:
    """Raise for the first picture that cannot be read, by its name."""
    _in_threads(lambda place: _opened(encoded, place), len(encoded))


def _in_threads(work: Callable[[int], object], count: int) -> None:
    """Work on each number below the count; Pillow decodes without Python's lock."""

    def share(first: int) -> None:
        for number in range(first, min(first + _SHARE, count)):
            work(number)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(share, range(0, count, _SHARE)):
            pass


def _opened(encoded: Encoded, place: int) -> Any:
    """A picture in colour."""
    data = encoded.read(place)
    name, remedy = encoded.name(place), "get it anew, or remove it"
    with (
        reading(name, "a whole picture", remedy),
        _pillow().open(io.BytesIO(data), formats=FORMATS) as image,
    ):
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"it has {image.width} x {image.height} pixels, more than 2^26")
        return image.convert("RGB")


def _central(size: tuple[int, int], centre: float) -> tuple[float, float, float, float]:
    width, height = size
    side = centre * min(size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _cropped(size: tuple[int, int], crop: Tensor) -> tuple[float, float, float, float]:
    """The box of a crop of a picture that need not be a square."""
    (width, height), (area, ratio, along, down) = size, crop.tolist()
    upright = torch.tensor([[area, ratio * height / width, along, down]], dtype=torch.float64)
    left, top, wide, high = relative_boxes(upright)[0].tolist()
    return left * width, top * height, (left + wide) * width, (top + high) * height


def _pillow() -> Any:
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        message = "pictures need Pillow: pip install 'primal-attention[images]'"
        raise ModuleNotFoundError(message, name=error.name) from error
    return Image
