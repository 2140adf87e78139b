"""Image classification pixel by pixel: grey CIFAR-10 (Krizhevsky, 2009), 1,024 tokens of 0 to 255.

Read from the binary distribution (``cifar-10-batches-bin``), the Python one
(``cifar-10-batches-py``) or an array of grey images (``cifar10_grey.npz``: x_train, y_train,
x_test, y_test), all in the same order.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.lra.cache import PartSizes, Prepared
from primal_attention.tasks.prepared import WRONG_FILE

BINARY, PYTHON, GREY = "cifar-10-batches-bin", "cifar-10-batches-py", "cifar10_grey.npz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
VALID = 0.1  # the last tenth of the training images
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


class Pictures(NamedTuple):
    """Grey images as rows of pixels, and their classes."""

    pixels: NDArray[np.uint8]  # [B, 1024]
    classes: NDArray[np.uint8]  # [B]


def read_image(place: Path) -> Prepared:
    """The images of any of the three distributions."""
    if place.name == GREY:
        train, test = _read_grey(place)
    else:
        suffix, read = (".bin", _read_binary) if place.name == BINARY else ("", _read_python)
        batches = [read(place / f"{name}{suffix}") for name in BATCHES]
        train, test = _joined(batches[:-1]), batches[-1]
    num_valid = round(VALID * len(train.pixels))
    sizes = PartSizes(len(train.pixels) - num_valid, num_valid, len(test.pixels))
    both = _joined([train, test])
    facts = {"read from": place.name}
    return Prepared("image", sizes, both.pixels, both.classes, facts=facts)


def grey(colour: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The luma of ITU-R 601 of images [B, 3072], which are red, then green, then blue."""
    red, green, blue = colour.reshape(-1, 3, 1024).astype(np.uint32).transpose(1, 0, 2)
    return ((19595 * red + 38470 * green + 7471 * blue + 32768) >> 16).astype(np.uint8)


def _joined(parts: list[Pictures]) -> Pictures:
    pixels, classes = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Pictures(pixels, classes)


def _read_binary(path: Path) -> Pictures:
    """A file of 3,073 bytes an image: its class, then its colours."""
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if not len(content) or len(content) % 3073:
        raise ValueError(f"{path} has {len(content)} bytes, not a multiple of 3,073")
    rows = content.reshape(-1, 3073)
    return _checked(path, grey(rows[:, 1:]), rows[:, 0])


def _read_python(path: Path) -> Pictures:
    """A pickled dictionary with ``data`` [B, 3072] and ``labels``."""
    try:
        with path.open("rb") as file:
            batch = ArrayUnpickler(file, encoding="latin1").load()
        data, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
    except (*WRONG_FILE, pickle.UnpicklingError, AttributeError, MemoryError) as error:
        raise ValueError(f"{path} is not a batch of CIFAR-10 ({error})") from error
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise ValueError(
            f"{path}: data must be uint8 [images, 3072], got {data.dtype} {data.shape}"
        )
    return _checked(path, grey(data), labels)


def _read_grey(path: Path) -> tuple[Pictures, Pictures]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            parts = [(arrays[f"x_{part}"], arrays[f"y_{part}"]) for part in ("train", "test")]
    except WRONG_FILE as error:
        raise ValueError(f"{path} has not x_train, y_train, x_test and y_test ({error})") from error
    for x, _ in parts:
        if x.dtype != np.uint8 or x.shape[1:] != (32, 32):
            raise ValueError(f"{path}: images must be uint8 [B, 32, 32], got {x.dtype} {x.shape}")
    train, test = (_checked(path, x.reshape(-1, 1024), y) for x, y in parts)
    return train, test


def _checked(path: Path, pixels: NDArray[np.uint8], classes: NDArray[Any]) -> Pictures:
    """As many classes as images, from 0 to 9."""
    if classes.shape != (len(pixels),) or not np.isin(classes, range(len(CLASSES))).all():
        raise ValueError(f"{path}: expected {len(pixels)} classes from 0 to 9")
    return Pictures(pixels, classes.astype(np.uint8))


_RECONSTRUCT = np.empty(0).__reduce__()[0]  # how numpy rebuilds an array
_ALLOWED = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _RECONSTRUCT for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): lambda text, _: text.encode("latin1"),  # bytes, in older pickles
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, strings and arrays.

    A pickle names functions to be called on loading; one from a stranger may name any. None but
    those that rebuild an array is called here.
    """

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name in the pickle."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it calls {module}.{name}, which is no part of an array")
        return _ALLOWED[module, name]
