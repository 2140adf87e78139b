"""Image classification pixel by pixel: grey CIFAR-10 (Krizhevsky, 2009), 1,024 tokens of 0 to 255.

Read from the binary distribution (``cifar-10-batches-bin``), the Python one
(``cifar-10-batches-py``) or an array of grey images (``cifar10_grey.npz``: x_train, y_train,
x_test, y_test), all in the same order.

A batch of the Python distribution is a pickle of protocol 2: a dictionary with ``data``, an array
uint8 [B, 3072], and ``labels``, a list of numbers. A pickle is a program whose words can call any
function; here the values of the few words that such a batch is made of are compared with those
that make such an array, and nothing is called.
"""

import io
import pickletools
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays
from primal_attention.foreign_files import read_bytes, reading
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask

BINARY, PYTHON, GREY = "cifar-10-batches-bin", "cifar-10-batches-py", "cifar10_grey.npz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
MOST = 2**26  # bytes of a file of one batch; a batch of 10,000 images takes 31 million
VALID = 0.1  # the last tenth of the training images
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_MOST_WORDS = 2**20  # of a pickle; a batch of 10,000 images has some 50,000
_STRUCTURE = {
    *("PROTO", "MARK", "EMPTY_DICT", "EMPTY_LIST", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "STOP"),
    *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "REDUCE", "BUILD"),
}
_MEMORISE, _RECALL = {"BINPUT", "LONG_BINPUT"}, {"BINGET", "LONG_BINGET"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *("BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "GLOBAL"),
    *(_RECALL | _CONSTANTS.keys()),
}
_ARRAY: list[Any] = [  # the values of the words that make an array uint8 [int, 3072] of a str
    *("numpy.core.multiarray _reconstruct", "numpy ndarray", 0, "b", 1, int, 3072),
    *("numpy dtype", "u1", 0, 1, 3, "|", None, None, None, -1, -1, 0, False, str),
]


class GreyPictures(NamedTuple):
    """Grey images as rows of pixels, and their classes."""

    pixels: NDArray[np.uint8]  # [B, 1024]
    classes: NDArray[np.uint8]  # [B]


def read_image(place: Path) -> PreparedTask:
    """Read the images of any of the three distributions."""
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


def _read_python(path: Path) -> GreyPictures:
    """Read a dictionary with ``data`` [B, 3072] and ``labels``."""
    with reading(path, "a batch of CIFAR-10", "get the whole file anew, or cifar-10-binary.tar.gz"):
        data, labels = _read_batch(read_bytes(path, MOST))
        return _checked(path, grey(data), np.array(labels))


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


def _read_batch(content: bytes) -> tuple[NDArray[np.uint8], list[int]]:
    """Read the array and the labels of a pickled batch; texts are as in Latin 1.

    Raises:
        ValueError: Where it is something else than a batch.
    """
    values: list[Any] = []  # of all words that have one, in order
    memo: dict[Any, Any] = {}
    last: Any = None
    for count, (word, value, _) in enumerate(pickletools.genops(io.BytesIO(content))):
        if count > _MOST_WORDS:
            raise ValueError(f"it has more than {_MOST_WORDS} words")
        if word.name in _MEMORISE:
            memo[value] = last
            continue
        if word.name not in _VALUES | _STRUCTURE:
            raise ValueError(f"it has the word {word.name}, which is no part of a batch")
        last = memo[value] if word.name in _RECALL else _CONSTANTS.get(word.name, value)
        values += [] if word.name in _STRUCTURE else [last]
    if "data" not in values or "labels" not in values:
        raise ValueError("it has no data and labels")
    start = values.index("data") + 1
    found = values[start : start + len(_ARRAY)]
    if len(found) < len(_ARRAY) or not all(
        type(each) is kind
        if isinstance(kind, type)
        else (each == kind and type(each) is type(kind))
        for each, kind in zip(found, _ARRAY, strict=True)
    ):
        raise ValueError("its data are no array uint8 [images, 3072]")
    pixels = np.frombuffer(found[-1].encode("latin-1"), np.uint8)
    if len(pixels) != found[_ARRAY.index(int)] * 3072:
        raise ValueError("its array has not as many values as its shape says")
    labels = takewhile(lambda each: type(each) is int, values[values.index("labels") + 1 :])
    return pixels.reshape(-1, 3072), list(labels)
