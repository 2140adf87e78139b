"""The Large Movie Review Dataset (Maas et al., 2011), as the folder ``aclImdb`` has it.

Reviews are ``{train,test}/{neg,pos}/<id>_<rating>.txt``; line ``id``, from 0 on, of
``{train,test}/urls_{neg,pos}.txt`` names the film. Reviews without a label (``unsup``) are ignored.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from primal_attention.foreign_files import read_bytes, read_text

FOLDER, FILMS = "aclImdb", "train/urls_pos.txt"
ORIGIN = "aclImdb_v1.tar.gz from ai.stanford.edu/~amaas/data/sentiment"
LABELS = ("neg", "pos")
_LONGEST = 2**20  # bytes of a review; the longest have 14 thousand
_LONGEST_LIST = 2**26  # bytes of a list of films; those of IMDb have 0.7 million


class Review(NamedTuple):
    """A review, the index of its label, and its number among those of its label."""

    text: bytes
    label: int
    number: int


class Filmed(NamedTuple):
    """A text and the film it is about."""

    text: bytes
    film: str


def reviews(folder: Path, part: str) -> Iterator[Review]:
    """Read all reviews of a part, the negative ones first, in the order of their numbers."""
    for label, name in enumerate(LABELS):
        files = {_number(path): path for path in (folder / part / name).glob("*.txt")}
        if not files:
            raise FileNotFoundError(f"{folder / part / name} has no reviews (<id>_<rating>.txt)")
        for number, path in sorted(files.items()):
            text = read_bytes(path, _LONGEST)
            if 255 in text:
                raise ValueError(f"{path} is no text in UTF-8, it has byte 255; get it anew")
            yield Review(text, label, number)


def filmed_reviews(folder: Path, part: str) -> Iterator[Filmed]:
    """Read all reviews of a part with their films, such as tt0453418."""
    lists = [folder / part / f"urls_{label}.txt" for label in LABELS]
    films = [read_text(path, _LONGEST_LIST).split() for path in lists]
    for text, label, number in reviews(folder, part):
        if number >= len(films[label]):
            raise ValueError(
                f"{lists[label]} has {len(films[label])} lines; "
                f"review {number} needs line {number + 1}"
            )
        url = films[label][number]
        yield Filmed(text, next((word for word in url.split("/") if word.startswith("tt")), url))


def _number(path: Path) -> int:
    if (match := re.fullmatch(r"(\d+)_\d+", path.stem)) is None:
        raise ValueError(f"{path} is not called <id>_<rating>.txt")
    return int(match[1])
