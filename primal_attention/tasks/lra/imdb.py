"""The Large Movie Review Dataset (Maas et al., 2011), as the folder ``aclImdb`` has it.

Reviews are ``{train,test}/{neg,pos}/<id>_<rating>.txt``; line ``id``, from 0 on, of
``{train,test}/urls_{neg,pos}.txt`` names the film. Reviews without a label (``unsup``) are ignored.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from primal_attention.foreign_files import read_bytes
from primal_attention.tasks.lra.byte_tokens import byte_tokens
from primal_attention.tasks.lra.cache import PartSizes, Prepared

LABELS = ("neg", "pos")
MOST = 2**20  # bytes of a review; the longest have 14 thousand


class Review(NamedTuple):
    """A review, the index of its label, and its number among those of its label."""

    text: bytes
    label: int
    number: int


def reviews(folder: Path, part: str) -> Iterator[Review]:
    """All reviews of a part, the negative ones first, in the order of their numbers."""
    for label, name in enumerate(LABELS):
        files = {_number(path): path for path in (folder / part / name).glob("*.txt")}
        if not files:
            raise FileNotFoundError(f"{folder / part / name} has no reviews (<id>_<rating>.txt)")
        for number, path in sorted(files.items()):
            text = read_bytes(path, MOST)
            if 255 in text:
                raise ValueError(f"{path} is no text in UTF-8, it has byte 255; get it anew")
            yield Review(text, label, number)


def _number(path: Path) -> int:
    if (match := re.fullmatch(r"(\d+)_\d+", path.stem)) is None:
        raise ValueError(f"{path} is not called <id>_<rating>.txt")
    return int(match[1])


def read_text(folder: Path) -> Prepared:
    """The sentiment of reviews from their bytes; the official parts, none to validate on."""
    train, test = (list(reviews(folder, part)) for part in ("train", "test"))
    both = train + test
    tokens = byte_tokens([review.text for review in both])
    targets = np.array([review.label for review in both], dtype=np.uint8)
    sizes = PartSizes(len(train), 0, len(test))
    return Prepared("text", sizes, tokens, targets, facts={"read from": "aclImdb"})
