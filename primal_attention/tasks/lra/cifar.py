"""Image classification pixel by pixel: grey CIFAR-10 (Krizhevsky, 2009), 1,024 tokens of 0 to 255.

Read from the binary distribution (``cifar-10-batches-bin``) or an array of grey images
(``cifar10_grey.npz``: x_train, y_train, x_test, y_test), both in the same order.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays
from primal_attention.foreign_files import read_bytes, reading
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask

BINARY, GREY = "cifar-10-batches-bin", "cifar10_grey.npz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
MOST = 2**26  # bytes of a file of one batch; a batch of 10,000 images takes 31 million
VALID = 0.1  # the last tenth of the training images
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


class GreyPictures(NamedTuple):
    """Grey images as rows of pixels, and their classes."""

    pixels: NDArray[np.uint8]  # [B, 1024]
    classes: NDArray[np.uint8]  # [B]


def read_image(place: Path) -> PreparedTask:
    """Read the images of either distribution."""
    if place.name == GREY:
        train, test = _read_grey(place)
    else:
        batches = [_read_binary(place / f"{name}.bin") for name in BATCHES]
        train, test = _joined(batches[:-1]), batches[-1]
    num_valid = round(VALID * len(train.pixels))
    sizes = PartSizes(len(train.pixels) - num_valid, num_valid, len(test.pixels))
    both = _joined([train, test])
    facts = {"read from": place.name}
    return PreparedTask("image", sizes, both.pixels, both.classes, facts=facts)


def grey(colour: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Compute the luma of ITU-R 601 of images [B, 3072], which are red, then green, then blue."""
    red, green, blue = colour.reshape(-1, 3, 1024).astype(np.uint32).transpose(1, 0, 2)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).astype(np.uint8)


def _joined(parts: list[GreyPictures]) -> GreyPictures:
    pixels, classes = (np.concatenate(each) for each in zip(*parts, strict=True))
    return GreyPictures(pixels, classes)


def _read_binary(path: Path) -> GreyPictures:
    """Read a file of 3,073 bytes an image: its class, then its colours."""
    content = np.frombuffer(read_bytes(path, MOST), dtype=np.uint8)
    if not len(content) or len(content) % 3073:
        raise ValueError(
            f"{path} has {len(content)} bytes, not a multiple of 3,073; get the whole file anew"
        )
    rows = content.reshape(-1, 3073)
    return _checked(path, grey(rows[:, 1:]), rows[:, 0])


def _read_grey(path: Path) -> tuple[GreyPictures, GreyPictures]:
    kind = "a file of grey images with x_train, y_train, x_test and y_test"
    with reading(path, kind, "get the whole file anew"), open_arrays(path) as arrays:
        parts = [(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
        for x, y in parts:
            if x.dtype != np.uint8 or x.shape[1:] != (32, 32) or y.dtype.kind not in "iu":
                raise ValueError(
                    f"images must be uint8 [B, 32, 32] with whole numbers, got {x.dtype} {x.shape} "
                    f"with {y.dtype}"
                )
        train, test = (_checked(path, x.reshape(-1, 1024), y) for x, y in parts)
    return train, test


def _checked(path: Path, pixels: NDArray[np.uint8], classes: NDArray[Any]) -> GreyPictures:
    """Check that there are as many classes as images, from 0 to 9."""
    found = classes.shape == (len(pixels),) and len(pixels) > 0
    if not found or not ((classes >= 0) & (classes < len(CLASSES))).all():
        raise ValueError(f"{path}: expected {len(pixels)} classes from 0 to 9; get the file anew")
    return GreyPictures(pixels, classes.astype(np.uint8))
