"""Pictures as cases: decoded once and kept, or decoded whenever they are asked for.

Letters: B pictures, S pixels of a side.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.extras import needing
from primal_attention.foreign_files import read_bytes, reading
from primal_attention.tasks.images.augmentation import (
    Augmentation,
    crop,
    draw_crops,
    relative_boxes,
)
from primal_attention.tasks.task import Batch, Cases

CENTRE = 7 / 8  # what an evaluation sees of the shorter side of a picture that is decoded anew
FORMATS = ("JPEG", "PNG", "WEBP")
MOST = 2**28  # bytes of a picture
MOST_PIXELS = 2**26  # of a picture; the largest of ImageNet has 61 million


@dataclass(frozen=True, eq=False)
class Encoded:
    """Pictures in files, and the class of each."""

    paths: Sequence[Path]
    labels: NDArray[np.int64]  # [B]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class OnDemand:
    """Pictures decoded on access, in place of a tensor of them."""

    encoded: Encoded
    places: Tensor  # which of them, on the CPU
    size: int  # S
    device: torch.device

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Decode their centres, uint8 [B, 3, S, S]."""
        places = self.places[indices.cpu()].tolist()
        return decoded(self.encoded, places, self.size, centre=CENTRE).to(self.device)

    def cropped(self, indices: Tensor, crops: Tensor) -> Tensor:
        """Decode the crops [B, 4] of them, from all of their pixels."""
        places = self.places[indices.cpu()].tolist()
        return decoded(self.encoded, places, self.size, crops=crops.cpu()).to(self.device)

    def to(self, device: torch.device) -> OnDemand:
        """Move the result of decoding to another device."""
        return replace(self, device=device)


@dataclass(frozen=True)
class PictureCases(Cases):
    """Pictures ``pictures`` uint8 [B, 3, S, S] and their classes [B].

    They are trained on cropped at random and augmented, with probabilities of the classes as the
    target; evaluations see them as they are.
    """

    num_classes: int = 0
    augmentation: Augmentation | None = None

    @property
    def resident(self) -> bool:
        """True where the pictures are decoded and on the device."""
        return isinstance(self.inputs["pictures"], Tensor)

    def drawn(self, indices: Tensor) -> Batch:
        """Crop and augment cases to train on."""
        if self.augmentation is None:
            return self[indices]
        stored: Any = self.inputs["pictures"]
        crops = draw_crops(len(indices), indices.device)
        if self.resident:
            x = crop(stored[indices].to(crops.dtype), crops)
        else:
            x = stored.cropped(indices, crops).to(crops.dtype)
        x, target = self.augmentation(x, self.target[indices], self.num_classes)
        return Batch({"pictures": x}, target)

    def joined(self, other: Cases) -> Cases:
        """Append other cases of the same files."""
        mine: Any = self.inputs["pictures"]
        theirs: Any = other.inputs["pictures"]
        if self.resident:
            return super().joined(other)
        pictures: Any = replace(mine, places=torch.cat([mine.places, theirs.places]))
        target = torch.cat([self.target, other.target])
        return replace(self, inputs={"pictures": pictures}, target=target)


def picture_cases(
    encoded: Encoded, places: Sequence[int], size: int, *, num_classes: int, resident: bool
) -> PictureCases:
    """Make cases of some of the pictures; ``resident`` decodes them now."""
    chosen = torch.as_tensor(places)
    stored: Any = OnDemand(encoded, chosen, size, chosen.device)
    if resident:
        stored = decoded(encoded, chosen.tolist(), size)
    target = torch.from_numpy(encoded.labels)[chosen]
    return PictureCases({"pictures": stored}, target, num_classes)


def decoded(
    encoded: Encoded,
    places: Iterable[int],
    size: int,
    *,
    centre: float = 1.0,
    crops: Tensor | None = None,
) -> Tensor:
    """Decode pictures to uint8 [B, 3, S, S] in colour.

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

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow decodes without Python's lock
        list(pool.map(decode, range(len(places))))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def _opened(encoded: Encoded, place: int) -> Any:
    path = encoded.paths[place]
    with (
        reading(path, "a whole picture", "get it anew, or remove it"),
        _pillow().open(io.BytesIO(read_bytes(path, MOST)), formats=FORMATS) as image,
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
    """Return the box of a crop of a picture that need not be a square."""
    (width, height), (area, ratio, along, down) = size, crop.tolist()
    upright = torch.tensor([[area, ratio * height / width, along, down]], dtype=torch.float64)
    left, top, wide, high = relative_boxes(upright)[0].tolist()
    return left * width, top * height, (left + wide) * width, (top + high) * height


def _pillow() -> Any:
    with needing("pictures need Pillow", "images"):
        from PIL import Image
    return Image
