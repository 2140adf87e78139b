"""Texts as bytes: the sentiment of reviews, and two texts that have something in common.

*Retrieval*: does a paper cite the other? From the ACL Anthology Network (Radev et al., 2013). The
original files are ``new_aan_pairs.{train,eval,test}.tsv``, without a head, with columns label, two
ids and two texts. Their text must not be passed on; a task like it is for those who have not the
papers: do two film reviews speak of the same film? Titles and names of actors give more away than
citations do, so results are of this task alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size, reading
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask
from primal_attention.tasks.reviews import Filmed, filmed_reviews, reviews

NUM_TOKENS = 4096
LONGEST = 4000  # what is longer is cut
PAIR_FILES = tuple(f"new_aan_pairs.{part}.tsv" for part in ("train", "eval", "test"))
MOST_TEXTS = 200_000  # of 4 KiB each; the network has some 20,000 papers
FILM_PAIRS = PartSizes(40_000, 5_000, 5_000)
VALID_FILMS = 0.12  # of those of the training part
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}

Ints = NDArray[np.int64]


def byte_tokens(texts: Sequence[bytes]) -> NDArray[np.uint8]:
    """Encode the first 4,000 bytes of each text as ids [texts, 4096]: a byte plus 1, 0 is padding.

    UTF-8 has no byte 255, so that all ids fit into a byte.
    """
    tokens = np.zeros((len(texts), NUM_TOKENS), dtype=np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        values = np.frombuffer(text[:LONGEST], dtype=np.uint8)
        row[: len(values)] = values + 1
        if (values == 255).any():
            raise ValueError(f"a text that begins with {text[:40]!r} is not UTF-8: it has byte 255")
    return tokens


def read_text(folder: Path) -> PreparedTask:
    """Read the sentiment of reviews; the official parts, none to validate on."""
    train, test = (list(reviews(folder, part)) for part in ("train", "test"))
    both = train + test
    tokens = byte_tokens([review.text for review in both])
    targets = np.array([review.label for review in both], dtype=np.uint8)
    sizes = PartSizes(len(train), 0, len(test))
    return PreparedTask("text", sizes, tokens, targets, facts={"read from": "aclImdb"})


def read_retrieval(folder: Path) -> PreparedTask:
    """Read the pairs of the three original files; each text is kept once."""
    rows: dict[bytes, int] = {}
    pairs: list[tuple[int, int]] = []
    labels: list[int] = []
    ends: list[int] = []
    for path in (folder / name for name in PAIR_FILES):
        with reading(path, "a list of pairs of texts", "get the whole file anew"):
            for label, one, other in _rows(path):
                pairs.append((rows.setdefault(one, len(rows)), rows.setdefault(other, len(rows))))
                labels.append(label)
                if len(rows) > MOST_TEXTS:
                    raise ValueError(f"it has more than {MOST_TEXTS} texts")
            if len(labels) == (ends[-1] if ends else 0):
                raise ValueError("it has no pair")
            ends.append(len(labels))
    train, valid, test = np.diff([0, *ends]).tolist()
    return PreparedTask(
        "retrieval",
        PartSizes(train, valid, test),
        byte_tokens(list(rows)),
        np.array(labels, dtype=np.uint8),
        np.array(pairs, dtype=np.int32),
        facts={"read from": list(PAIR_FILES)},
    )


def _rows(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield label and texts, as far as they count; files may be larger than memory."""
    file_size(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5 or columns[0] not in _LABELS:
                raise ValueError(
                    f"line {number}: expected label (0 or 1), id, id, text, text, got "
                    f"{len(columns)} columns, the first {columns[0][:20]!r}"
                )
            one, other = (column[:LONGEST] for column in columns[3:])
            if b"\xff" in one + other:
                raise ValueError(f"line {number}: byte 255 is no text in UTF-8")
            yield _LABELS[columns[0]], one, other


def read_retrieval_imdb(
    folder: Path, *, sizes: PartSizes = FILM_PAIRS, seed: int = 0
) -> PreparedTask:
    """Draw balanced pairs of reviews; no film is in two parts, no text there twice.

    Args:
        folder: ``aclImdb``.
        sizes: Of the parts, in pairs; odd ones have one negative more.
        seed: Of the pairs and of the films that are held out.
    """
    rng = np.random.default_rng(seed)
    both, test = _different(*(list(filmed_reviews(folder, part)) for part in ("train", "test")))
    films = sorted({review.film for review in both})
    held_out = set(rng.permutation(films)[: round(VALID_FILMS * len(films))].tolist())
    train = [review for review in both if review.film not in held_out]
    valid = [review for review in both if review.film in held_out]
    parts = (train, valid, test)
    first_rows = np.cumsum([0, len(train), len(valid)])
    with reading(folder, "enough to draw pairs from", "get it whole, or ask for smaller sizes"):
        drawn = [_pairs(part, size, rng) for part, size in zip(parts, sizes, strict=True)]
    pairs = np.concatenate([each + row for (each, _), row in zip(drawn, first_rows, strict=True)])
    used, pairs = np.unique(pairs, return_inverse=True)
    texts = [review.text for part in parts for review in part]
    return PreparedTask(
        "retrieval-imdb",
        sizes,
        byte_tokens([texts[row] for row in used]),
        np.concatenate([labels for _, labels in drawn]).astype(np.uint8),
        pairs.reshape(-1, 2).astype(np.int32),
        facts={"made by": "read_retrieval_imdb", "seed": seed, "read from": "aclImdb"},
    )


def _different(train: list[Filmed], test: list[Filmed]) -> tuple[list[Filmed], list[Filmed]]:
    """Take each text once and none of two films; leave the films of train out of test."""
    films: dict[bytes, set[str]] = {}
    for text, film in (*train, *test):
        films.setdefault(text, set()).add(film)
    of_train = {review.film for review in train}
    clear = {text for text, named in films.items() if len(named) == 1}
    train, test = (
        [each for each in dict.fromkeys(part) if each.text in clear] for part in (train, test)
    )
    return train, [each for each in test if each.film not in of_train]


def _pairs(part: list[Filmed], num: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Draw pairs [num, 2] of indices, in any order, labelled 1 where the films are the same."""
    films = np.unique([review.film for review in part], return_inverse=True)[1]
    positive = _same_film(films, num // 2, rng)
    negative = _other_film(films, positive, num - num // 2, rng)
    order = rng.permutation(num)
    labels = np.repeat([1, 0], [len(positive), len(negative)])
    return np.concatenate([positive, negative])[order], labels[order]


def _same_film(films: Ints, num: int, rng: np.random.Generator) -> Ints:
    """Draw different pairs of reviews of one film, all equally likely."""
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
    """Draw pairs of different films from the reviews of the positive pairs.

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
