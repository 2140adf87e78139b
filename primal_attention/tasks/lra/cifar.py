"""Image classification pixel by pixel: grey CIFAR-10 (Krizhevsky, 2009), 1,024 tokens of 0 to 255.

Read from the binary distribution (``cifar-10-batches-bin``), the Python one
(``cifar-10-batches-py``) or an array of grey images (``cifar10_grey.npz``: x_train, y_train,
x_test, y_test), all in the same order.

A batch of the Python distribution is a pickle of protocol 2: a dictionary with ``data``, an array
uint8 [B, 3072], and ``labels``, a list of numbers. A pickle is a program whose words can call any
function; here the few words that such a batch is made of are followed, and none calls anything.
"""

import io
import math
import pickletools
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays
from primal_attention.foreign_files import read_bytes, reading
from primal_attention.tasks.lra.prepared import PartSizes, Prepared

BINARY, PYTHON, GREY = "cifar-10-batches-bin", "cifar-10-batches-py", "cifar10_grey.npz"
BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
MOST = 2**26  # bytes of a file of one batch; a batch of 10,000 images takes 31 million
VALID = 0.1  # the last tenth of the training images
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_MOST_WORDS = 2**20  # of a pickle; a batch of 10,000 images has some 50,000
_MARK = object()
_BYTES_STATE = (3, "|", None, None, None, -1, -1, 0)


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
    content = np.frombuffer(read_bytes(path, MOST), dtype=np.uint8)
    if not len(content) or len(content) % 3073:
        raise ValueError(
            f"{path} has {len(content)} bytes, not a multiple of 3,073; get the whole file anew"
        )
    rows = content.reshape(-1, 3073)
    return _checked(path, grey(rows[:, 1:]), rows[:, 0])


def _read_python(path: Path) -> Pictures:
    """A dictionary with ``data`` [B, 3072] and ``labels``."""
    with reading(path, "a batch of CIFAR-10", "get the whole file anew, or cifar-10-binary.tar.gz"):
        batch = read_batch(read_bytes(path, MOST))
        data, labels = batch.get("data"), batch.get("labels")
        if not isinstance(data, Array) or data.values is None:
            raise ValueError("it has no array data")
        if data.values.ndim != 2 or data.values.shape[1] != 3072:
            raise ValueError(f"data must be uint8 [images, 3072], got {list(data.values.shape)}")
        if not isinstance(labels, list) or not all(type(each) is int for each in labels):
            raise ValueError("it has no list of labels")
        return _checked(path, grey(data.values), np.array(labels))


def _read_grey(path: Path) -> tuple[Pictures, Pictures]:
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


def _checked(path: Path, pixels: NDArray[np.uint8], classes: NDArray[Any]) -> Pictures:
    """As many classes as images, from 0 to 9."""
    found = classes.shape == (len(pixels),) and len(pixels) > 0
    if not found or not ((classes >= 0) & (classes < len(CLASSES))).all():
        raise ValueError(f"{path}: expected {len(pixels)} classes from 0 to 9; get the file anew")
    return Pictures(pixels, classes.astype(np.uint8))


class Name(Enum):
    """The names in a batch, which stand for themselves here."""

    RECONSTRUCT = "numpy.core.multiarray _reconstruct"
    NDARRAY = "numpy ndarray"
    DTYPE = "numpy dtype"


class Bytes:
    """The type uint8, once a batch has named it."""


class Array:
    """An array of uint8; without values until the batch gives them."""

    def __init__(self) -> None:
        self.values: NDArray[np.uint8] | None = None


def read_batch(content: bytes) -> dict[str, Any]:
    """The dictionary of a batch; texts are as in Latin 1.

    Raises:
        ValueError: Where it is something else than a batch.
    """
    reader = _Reader()
    for count, (word, value, _) in enumerate(pickletools.genops(io.BytesIO(content))):
        if count > _MOST_WORDS:
            raise ValueError(f"it has more than {_MOST_WORDS} words")
        if word.name == "STOP":
            break
        reader.follow(word.name, value)
    batch = reader.pop()
    if not isinstance(batch, dict):
        raise ValueError("it is no dictionary")
    return batch


class _Reader:
    """The stack and the memo of a pickle that is followed."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.words: dict[str, Callable[[], object]] = {
            "EMPTY_DICT": lambda: self.stack.append({}),
            "EMPTY_LIST": lambda: self.stack.append([]),
            "NONE": lambda: self.stack.append(None),
            "NEWTRUE": lambda: self.stack.append(True),
            "NEWFALSE": lambda: self.stack.append(False),
            "MARK": lambda: self.stack.append(_MARK),
            "TUPLE": lambda: self.stack.append(tuple(self.pop_to_mark())),
            "TUPLE1": lambda: self.stack.append((self.pop(),)),
            "TUPLE2": lambda: self.stack.append(tuple(reversed([self.pop() for _ in range(2)]))),
            "TUPLE3": lambda: self.stack.append(tuple(reversed([self.pop() for _ in range(3)]))),
            "APPEND": lambda: self.extend([self.pop()]),
            "APPENDS": lambda: self.extend(self.pop_to_mark()),
            "SETITEM": lambda: self.set_items(list(reversed([self.pop() for _ in range(2)]))),
            "SETITEMS": lambda: self.set_items(self.pop_to_mark()),
            "REDUCE": self.reduce,
            "BUILD": self.build,
        }

    def follow(self, word: str, value: Any) -> None:
        """Do what a word of a batch says."""
        match word:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2" | "BINSTRING" | "SHORT_BINSTRING" | "BINUNICODE":
                self.stack.append(value)
            case "BINPUT" | "LONG_BINPUT":
                self.memo[value] = self.top()
            case "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[value])
            case "GLOBAL":
                self.stack.append(_name(value))
            case _ if word in self.words:
                self.words[word]()
            case _:
                raise ValueError(f"it has the word {word}, which is no part of a batch")

    def top(self) -> Any:
        """What was pushed last."""
        if not self.stack or self.stack[-1] is _MARK:
            raise ValueError("it takes more than it has given")
        return self.stack[-1]

    def pop(self) -> Any:
        """Take what was pushed last."""
        self.top()
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        """Take all that was pushed since the last mark."""
        taken: list[Any] = []
        while self.stack and self.stack[-1] is not _MARK:
            taken.append(self.stack.pop())
        if not self.stack:
            raise ValueError("it takes more than it has given")
        self.stack.pop()
        return taken[::-1]

    def extend(self, values: list[Any]) -> None:
        """Put values at the end of a list."""
        if not isinstance(found := self.top(), list):
            raise ValueError("it appends to what is no list")
        found.extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Put keys and their values into a dictionary."""
        if not isinstance(found := self.top(), dict) or len(values) % 2:
            raise ValueError("it sets items of what is no dictionary")
        for key, value in list(pairwise(values))[::2]:
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            found[key] = value

    def reduce(self) -> None:
        """An array or its type, as yet without what ``build`` says of it."""
        arguments, name = self.pop(), self.pop()
        if name is Name.RECONSTRUCT and arguments == (Name.NDARRAY, (0,), "b"):
            self.stack.append(Array())
        elif name is Name.DTYPE and arguments == ("u1", 0, 1):
            self.stack.append(Bytes())
        else:
            raise ValueError("it calls something else than an array of uint8 is made of")

    def build(self) -> None:
        """The shape and the values of an array; its type has but one state."""
        state, found = self.pop(), self.top()
        if isinstance(found, Array) and isinstance(state, tuple) and len(state) == 5:
            version, shape, kind, in_columns, values = state
            if (version, in_columns) == (1, False) and isinstance(kind, Bytes):
                found.values = _array(shape, values)
                return
        if not isinstance(found, Bytes) or state != _BYTES_STATE:
            raise ValueError("it builds something else than an array of uint8")


def _name(value: str) -> Name:
    try:
        return Name(value)
    except ValueError:
        raise ValueError(
            f"it names {value.replace(' ', '.')[:60]}, which is no part of an array"
        ) from None


def _array(shape: Any, values: Any) -> NDArray[np.uint8]:
    if not isinstance(shape, tuple) or not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError("its array has no shape")
    if not isinstance(values, str) or len(values) != math.prod(shape):
        raise ValueError(f"its array of {str(shape)[:40]} has not as many values")
    return np.frombuffer(values.encode("latin-1"), np.uint8).reshape(shape)
