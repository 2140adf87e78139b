"""Where pictures are read from: a prepared ``<folder>/<name>.npz``, or else ``<folder>/<name>``.

A set that is a part of another is read from that one where it has no folder of its own.
"""

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from primal_attention.tasks.images.cache import read_prepared, write_prepared
from primal_attention.tasks.images.folders import PictureSet, read_folder
from primal_attention.tasks.images.imagenet_100 import IMAGENET_100

IMAGE_SETS = ("tiny-imagenet-100", "tiny-imagenet-200", "imagenet-100", "imagenet-1k")


class Part(NamedTuple):
    """Some classes of another set."""

    of: str
    choose: Callable[[list[str]], Sequence[str]]


PARTS: dict[str, Part] = {
    "tiny-imagenet-100": Part("tiny-imagenet-200", lambda classes: classes[:100]),
    "imagenet-100": Part("imagenet-1k", lambda _: IMAGENET_100),
}


def load_images(name: str, folder: Path | None = None) -> PictureSet:
    """The pictures of a set, still encoded.

    Args:
        name: One of ``IMAGE_SETS``, or any set whose folder is there; see ``read_folder``.
        folder: Where to look; ``images`` in the folder that the environment variable
            ``PRIMAL_DATA`` names, and that folder itself, or in ``data``, unless told. It may be
            the folder of the set itself.
    """
    place = find_images(name, folder)
    if place is None:
        raise FileNotFoundError(_what_to_do(name, folder))
    return read_prepared(place) if place.suffix == ".npz" else _read(name, place)


def find_images(name: str, folder: Path | None = None) -> Path | None:
    """Where ``load_images`` would read a set from; None where it is not at hand."""
    prepared = (each / f"{name}.npz" for each in images_folders(folder))
    return next((path for path in prepared if path.is_file()), _find_folder(name, folder))


def prepare_images(name: str, folder: Path | None = None, out: Path | None = None) -> Path:
    """Write a set to ``<out>/<name>.npz``: one file, with the bytes of the pictures as they are.

    Each picture is looked at, so that one that is cut off is found now.

    Args:
        name: As for ``load_images``.
        folder: Where its pictures are; a prepared file there is not read.
        out: Where to write; the folder unless told.
    """
    place = _find_folder(name, folder)
    if place is None:
        raise FileNotFoundError(_what_to_do(name, folder))
    path = (images_folders(folder)[0] if out is None else Path(out)) / f"{name}.npz"
    write_prepared(path, _read(name, place))
    return path


def images_folders(folder: Path | None = None) -> list[Path]:
    """Where to look; prepared files are written to the first."""
    if folder is not None:
        return [Path(folder)]
    data = Path(os.environ.get("PRIMAL_DATA", "data"))
    return [data / "images", data]


def _find_folder(name: str, folder: Path | None) -> Path | None:
    """The folder that holds the pictures of a set, or of the set it is a part of."""
    names = [name, *([PARTS[name].of] if name in PARTS else [])]
    places = [each / name for name in names for each in images_folders(folder)]
    places += [] if folder is None else [Path(folder)]
    return next((each for each in places if (each / "train").is_dir()), None)


def _read(name: str, place: Path) -> PictureSet:
    part = PARTS.get(name)
    whole = part is None or place.name != part.of
    return read_folder(place) if whole or part is None else read_folder(place, part.choose)


def _what_to_do(name: str, folder: Path | None) -> str:
    place = images_folders(folder)[0]
    near = [] if name in IMAGE_SETS else difflib.get_close_matches(name, IMAGE_SETS)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"{name}: no pictures. {hint}Put them into {place / name}, in train/<class> and "
        f"val/<class>, or a prepared {name}.npz into {place}"
    )
