"""Pictures in folders, one for each class, as torchvision's ``ImageFolder`` has them.

``train/<class>/`` and ``val/<class>/``, or ``test/<class>/`` where there is no ``val``; pictures
may lie in folders below. ``val`` may be as in Tiny-ImageNet-200: ``val/images`` with the classes in
``val_annotations.txt``. A file ``classes.txt`` beside ``train`` names the classes to read, one a
line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import is_plain_name, read_bytes, read_text

SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
CLASSES, ANNOTATIONS = "classes.txt", "val_annotations.txt"
MOST = 2**28  # bytes of a picture or of a list


@dataclass(frozen=True, eq=False)
class Encoded:
    """Pictures as the bytes of their files, and the class of each."""

    read: Callable[[int], bytes]
    name: Callable[[int], str]  # of a picture, for messages
    labels: NDArray[np.int64]  # [B]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Pictures to learn from and pictures to test on."""

    classes: tuple[str, ...]  # by number
    train: Encoded
    test: Encoded


def read_folder(
    folder: Path, choose: Callable[[list[str]], Sequence[str]] = lambda classes: classes
) -> PictureSet:
    """The pictures of a folder; they are not opened yet.

    Args:
        folder: With ``train`` and ``val`` or ``test``.
        choose: Picks classes out of all, which are sorted.

    Raises:
        FileNotFoundError: Naming the folder that is not there.
        ValueError: Naming the class that has no picture, or the list that names what is missing.
    """
    train, test = folder / "train", _test_folder(folder)
    if not train.is_dir():
        raise FileNotFoundError(f"{train} is missing; pictures lie in train/<class>")
    listed = folder / CLASSES
    found = sorted(each.name for each in train.iterdir() if each.is_dir())
    classes = _read_classes(listed, found) if listed.is_file() else sorted(choose(found))
    annotations = test / ANNOTATIONS
    places = _annotated(annotations) if annotations.is_file() else None
    files = [_pictures(train / name) for name in classes]
    tested = [_pictures(test / name) if places is None else places.get(name) for name in classes]
    for name, here in zip(classes, tested, strict=True):
        if not here:
            raise ValueError(f"{annotations} has no picture of the class {name}")
    if places is not None:
        _check_present(annotations, [path for here in tested for path in here or []])
    return PictureSet(tuple(classes), _encoded(files), _encoded([each or [] for each in tested]))


def _test_folder(folder: Path) -> Path:
    for name in ("val", "test"):
        if (folder / name).is_dir():
            return folder / name
    raise FileNotFoundError(f"{folder} has neither val nor test; one of them is needed")


def _read_classes(path: Path, found: Sequence[str]) -> list[str]:
    """The first word of each line, which is one of the classes found."""
    lines = (line.split() for line in read_text(path, MOST).splitlines())
    classes = sorted({_plain(path, line[0]) for line in lines if line})
    if not classes:
        raise ValueError(f"{path} names no class; write one a line, or remove it")
    if missing := sorted(set(classes) - set(found)):
        place = path.parent / "train" / missing[0][:60]
        raise ValueError(f"{path} names a class whose folder {place} is missing; mend the list")
    return classes


def _pictures(folder: Path) -> list[Path]:
    """The pictures of a class, in order."""
    files = (each for each in folder.rglob("*") if each.suffix.lower() in SUFFIXES)
    found = sorted(files)
    if not found:
        what = "has no picture" if folder.is_dir() else "is missing"
        raise ValueError(f"{folder} {what}; each class needs some ({', '.join(SUFFIXES)})")
    return found


def _annotated(path: Path) -> dict[str, list[Path]]:
    """The pictures of each class that a list of them names: file, class and a box on each line."""
    found: dict[str, list[Path]] = {}
    for number, line in enumerate(read_text(path, MOST).splitlines(), 1):
        words = line.split()
        if len(words) < 2:
            raise ValueError(
                f"{path}, line {number}: a picture and its class expected, got {line[:60]!r}"
            )
        place = path.parent / "images" / _plain(path, words[0])
        found.setdefault(words[1], []).append(place)
    return found


def _check_present(path: Path, pictures: Sequence[Path]) -> None:
    """Refuse a list of pictures some of which are missing."""
    images = path.parent / "images"
    present = {each.name for each in images.iterdir()} if images.is_dir() else set()
    for picture in pictures:
        if picture.name not in present:
            raise ValueError(
                f"{path} names the picture {picture.name[:60]!r}, which is not in {images}; "
                "mend the list, or get the pictures anew"
            )


def _plain(path: Path, name: str) -> str:
    """A name that a list gives, which stays in its folder."""
    if not is_plain_name(name):
        raise ValueError(
            f"{path} names {name[:60]!r}, which is no name in its folder; mend the list"
        )
    return name


def _encoded(files: Sequence[Sequence[Path]]) -> Encoded:
    """Pictures from the files of each class."""
    paths = [path for each in files for path in each]
    labels = np.repeat(np.arange(len(files)), [len(each) for each in files])
    return Encoded(lambda i: read_bytes(paths[i], MOST), lambda i: str(paths[i]), labels)
