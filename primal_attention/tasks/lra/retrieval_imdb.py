"""Retrieval from film reviews: do two reviews speak of the same film?

A task like the retrieval of the Long Range Arena for those who have not its papers; titles and
names of actors give more away than citations do, so results are of this task alone.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import read_text, reading
from primal_attention.tasks.lra.byte_tokens import byte_tokens
from primal_attention.tasks.lra.cache import PartSizes, Prepared
from primal_attention.tasks.lra.imdb import LABELS, reviews

SIZES = PartSizes(40_000, 5_000, 5_000)
MOST = 2**26  # bytes of a list of films; those of IMDb have 0.7 million
VALID_FILMS = 0.12  # of those of the training part

Ints = NDArray[np.int64]


class Filmed(NamedTuple):
    """A text and the film it is about."""

    text: bytes
    film: str


def read_retrieval_imdb(folder: Path, *, sizes: PartSizes = SIZES, seed: int = 0) -> Prepared:
    """Balanced pairs of reviews; no film is in two parts, no text there twice.

    Args:
        folder: ``aclImdb``.
        sizes: Of the parts, in pairs; odd ones have one negative more.
        seed: Of the pairs and of the films that are held out.
    """
    rng = np.random.default_rng(seed)
    train, test = _different(_filmed(folder, "train"), _filmed(folder, "test"))
    train, valid = _films_apart(train, rng)
    parts = (train, valid, test)
    first_rows = np.cumsum([0, len(train), len(valid)])
    with reading(folder, "enough to draw pairs from", "get it whole, or ask for smaller sizes"):
        drawn = [_pairs(part, size, rng) for part, size in zip(parts, sizes, strict=True)]
    pairs = np.concatenate([each + row for (each, _), row in zip(drawn, first_rows, strict=True)])
    used, pairs = np.unique(pairs, return_inverse=True)
    texts = [review.text for part in parts for review in part]
    return Prepared(
        "retrieval-imdb",
        sizes,
        byte_tokens([texts[row] for row in used]),
        np.concatenate([labels for _, labels in drawn]).astype(np.uint8),
        pairs.reshape(-1, 2).astype(np.int32),
        facts={"made by": "read_retrieval_imdb", "seed": seed, "read from": "aclImdb"},
    )


def _filmed(folder: Path, part: str) -> list[Filmed]:
    """The reviews of a part with their films."""
    films = [read_text(folder / part / f"urls_{label}.txt", MOST).split() for label in LABELS]
    found = []
    for text, label, number in reviews(folder, part):
        if number >= len(films[label]):
            raise ValueError(
                f"{folder / part / f'urls_{LABELS[label]}.txt'} has {len(films[label])} lines; "
                f"review {number} needs line {number + 1}"
            )
        found.append(Filmed(text, _film(films[label][number])))
    return found


def _film(url: str) -> str:
    """Such as tt0453418."""
    return next((word for word in url.split("/") if word.startswith("tt")), url)


def _different(train: list[Filmed], test: list[Filmed]) -> tuple[list[Filmed], list[Filmed]]:
    """Both parts, test without the films of train, each text once and none of two films."""
    films: dict[bytes, set[str]] = {}
    for text, film in (*train, *test):
        films.setdefault(text, set()).add(film)
    of_train = {review.film for review in train}
    clear = {text for text, named in films.items() if len(named) == 1}
    return (
        [review for review in dict.fromkeys(train) if review.text in clear],
        [
            review
            for review in dict.fromkeys(test)
            if review.text in clear and review.film not in of_train
        ],
    )


def _films_apart(
    train: list[Filmed], rng: np.random.Generator
) -> tuple[list[Filmed], list[Filmed]]:
    """Hold out the reviews of some films."""
    films = sorted({review.film for review in train})
    held_out = set(rng.permutation(films)[: round(VALID_FILMS * len(films))].tolist())
    return (
        [review for review in train if review.film not in held_out],
        [review for review in train if review.film in held_out],
    )


def _pairs(part: list[Filmed], num: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Pairs [num, 2] of indices, and whether the films are the same, in any order."""
    films = np.unique([review.film for review in part], return_inverse=True)[1]
    positive = _same_film(films, num // 2, rng)
    negative = _other_film(films, positive, num - num // 2, rng)
    order = rng.permutation(num)
    labels = np.repeat([1, 0], [len(positive), len(negative)])
    return np.concatenate([positive, negative])[order], labels[order]


def _same_film(films: Ints, num: int, rng: np.random.Generator) -> Ints:
    """Different pairs of reviews of one film, all equally likely."""
    order = np.argsort(films, kind="stable")
    by_film = np.split(order, np.flatnonzero(np.diff(films[order])) + 1)
    pairs = [
        np.stack([group[one], group[other]], axis=1)
        for group in by_film
        for one, other in [np.triu_indices(len(group), k=1)]
    ]
    every = np.concatenate(pairs)
    if len(every) < num:
        raise ValueError(f"sizes asks for {num} pairs of one film; there are {len(every)}")
    return rng.permuted(every[rng.permutation(len(every))[:num]], axis=1)


def _other_film(films: Ints, positive: Ints, num: int, rng: np.random.Generator) -> Ints:
    """Pairs of different films, of the very reviews of the positive pairs.

    A review is in as many negative pairs as in positive ones, so that it tells nothing by itself.
    """
    one, other = positive[:, 0], rng.permutation(positive[:, 1])
    if num > len(positive):
        one, other = (np.append(each, each[: num - len(positive)]) for each in (one, other))
    for _ in range(1000):
        same = np.flatnonzero(films[one] == films[other])
        if not len(same):
            return np.stack([one, other], axis=1)
        for index, partner in zip(same, rng.integers(num, size=len(same)), strict=True):
            other[[index, partner]] = other[[partner, index]]
    raise ValueError("there are too few films to draw pairs of different ones")
