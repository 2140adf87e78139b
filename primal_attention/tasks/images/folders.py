"""Sets of pictures: folders with one for each class.

A folder is as torchvision's ``ImageFolder`` has it: ``train/<class>/`` and ``val/<class>/``, or
``test/<class>/`` where there is no ``val``; pictures may lie in folders below. ``val`` may be as in
Tiny-ImageNet-200: ``val/images`` with the classes in ``val_annotations.txt``.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from primal_attention.foreign_files import is_plain_name, read_text
from primal_attention.tasks.images.cases import Encoded
from primal_attention.tasks.prepared import data_folders

IMAGE_SETS = ("tiny-imagenet-100", "tiny-imagenet-200", "imagenet-100", "imagenet-1k")
SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")
ANNOTATIONS = "val_annotations.txt"
MOST = 2**28  # bytes of a list

IMAGENET_100: tuple[str, ...] = (
    *("n01558993", "n01692333", "n01729322", "n01735189", "n01749939", "n01773797", "n01820546"),
    *("n01855672", "n01978455", "n01980166", "n01983481", "n02009229", "n02018207", "n02085620"),
    *("n02086240", "n02086910", "n02087046", "n02089867", "n02089973", "n02090622", "n02091831"),
    *("n02093428", "n02099849", "n02100583", "n02104029", "n02105505", "n02106550", "n02107142"),
    *("n02108089", "n02109047", "n02113799", "n02113978", "n02114855", "n02116738", "n02119022"),
    *("n02123045", "n02138441", "n02172182", "n02231487", "n02259212", "n02326432", "n02396427"),
    *("n02483362", "n02488291", "n02701002", "n02788148", "n02804414", "n02859443", "n02869837"),
    *("n02877765", "n02974003", "n03017168", "n03032252", "n03062245", "n03085013", "n03259280"),
    *("n03379051", "n03424325", "n03492542", "n03494278", "n03530642", "n03584829", "n03594734"),
    *("n03637318", "n03642806", "n03764736", "n03775546", "n03777754", "n03785016", "n03787032"),
    *("n03794056", "n03837869", "n03891251", "n03903868", "n03930630", "n03947888", "n04026417"),
    *("n04067472", "n04099969", "n04111531", "n04127249", "n04136333", "n04229816", "n04238763"),
    *("n04336792", "n04418357", "n04429376", "n04435653", "n04485082", "n04493381", "n04517823"),
    *("n04589890", "n04592741", "n07714571", "n07715103", "n07753275", "n07831146", "n07836838"),
    *("n13037406", "n13040303"),
)
"""The hundred classes of ImageNet-100, as drawn by Tian et al. (2019) and used since."""


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Pictures to learn from and pictures to test on."""

    classes: tuple[str, ...]  # by number
    train: Encoded
    test: Encoded


class Part(NamedTuple):
    """Some classes of another set, from which they are read without a folder of their own."""

    of: str
    choose: Callable[[list[str]], Sequence[str]]


PARTS: dict[str, Part] = {
    "tiny-imagenet-100": Part("tiny-imagenet-200", lambda classes: classes[:100]),
    "imagenet-100": Part("imagenet-1k", lambda _: IMAGENET_100),
}


def read_folder(
    folder: Path, choose: Callable[[list[str]], Sequence[str]] = lambda classes: classes
) -> PictureSet:
    """List the pictures of a folder; they are not opened yet.

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
    classes = sorted(choose(sorted(each.name for each in train.iterdir() if each.is_dir())))
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


def _pictures(folder: Path) -> list[Path]:
    found = sorted(each for each in folder.rglob("*") if each.suffix.lower() in SUFFIXES)
    if not found:
        what = "has no picture" if folder.is_dir() else "is missing"
        raise ValueError(f"{folder} {what}; each class needs some ({', '.join(SUFFIXES)})")
    return found


def _annotated(path: Path) -> dict[str, list[Path]]:
    """Read a list with a picture, its class and a box on each line."""
    found: dict[str, list[Path]] = {}
    for number, line in enumerate(read_text(path, MOST).splitlines(), 1):
        words = line.split()
        if len(words) < 2:
            raise ValueError(
                f"{path}, line {number}: a picture and its class expected, got {line[:60]!r}"
            )
        if not is_plain_name(words[0]):
            raise ValueError(
                f"{path} names {words[0][:60]!r}, which is no name in its folder; mend the list"
            )
        found.setdefault(words[1], []).append(path.parent / "images" / words[0])
    return found


def _check_present(path: Path, pictures: Sequence[Path]) -> None:
    images = path.parent / "images"
    present = {each.name for each in images.iterdir()} if images.is_dir() else set()
    for picture in pictures:
        if picture.name not in present:
            raise ValueError(
                f"{path} names the picture {picture.name[:60]!r}, which is not in {images}; "
                "mend the list, or get the pictures anew"
            )


def _encoded(files: Sequence[Sequence[Path]]) -> Encoded:
    paths = [path for each in files for path in each]
    labels = np.repeat(np.arange(len(files)), [len(each) for each in files])
    return Encoded(paths, labels)


def find_images(name: str, folder: Path | None = None) -> Path | None:
    """Return the folder of a set, or of the set that it is a part of, None where there is none.

    Args:
        name: Of the set.
        folder: Where to look, or the set itself; by default see ``data_folders``.
    """
    names = [name, *([PARTS[name].of] if name in PARTS else [])]
    places = [each / name for name in names for each in data_folders("images", folder)]
    places += [] if folder is None else [Path(folder)]
    return next((each for each in places if (each / "train").is_dir()), None)


def load_images(name: str, folder: Path | None = None) -> PictureSet:
    """List the pictures of a set; see ``find_images`` and ``read_folder``."""
    place = find_images(name, folder)
    if place is None:
        near = [] if name in IMAGE_SETS else difflib.get_close_matches(name, IMAGE_SETS)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        folder = data_folders("images", folder)[0]
        raise FileNotFoundError(
            f"{name}: no pictures. {hint}Put them into {folder / name}, in train/<class> and "
            "val/<class>"
        )
    part = PARTS.get(name)
    if part is not None and place.name == part.of:
        return read_folder(place, part.choose)
    return read_folder(place)
