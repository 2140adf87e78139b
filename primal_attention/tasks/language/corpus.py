"""Word-level texts in three parts: WikiText as it is handed out, IMDb's reviews split by film.

The words of WikiText stand between blanks, and each line ends in one more, ``<eos>``. The
vocabulary is that of the training part, the most frequent word first; others are ``<unk>``.

A review of IMDb is lower-cased no more than WikiText is. Its words are runs of letters and digits,
with apostrophes within them; any other character but a blank is a word of its own, line breaks of
HTML are none. It ends in ``<eos>``. The vocabulary has the words that the training part has at
least so many times, as few as make 60,000 words or fewer of it. A stable hash of its film puts a
review into a part, a tenth each to validate and to test on, so that no film is in two parts. A text
that stands there twice is taken once, with the film that has it first.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import ArrayFile
from primal_attention.foreign_files import file_size, reading
from primal_attention.tasks import reviews
from primal_attention.tasks.prepared import PreparedSets, data_folders

EOS, UNK = "<eos>", "<unk>"
PARTS = ("train", "valid", "test")
FILES = tuple(f"wiki.{part}.tokens" for part in PARTS)
IMDB = "imdb"
LANGUAGE_SETS = ("wikitext-2", "wikitext-103", IMDB)
MOST_WORDS = 60_000  # of the vocabulary of IMDb
_LARGEST = 2**24  # bytes of a vocabulary; that of WikiText-103 takes 2.3 million
_WORD = re.compile(r"\w+(?:['\u2019]\w+)*|[^\w\s]")
_LINE_BREAK = re.compile(r"<br\s*/?>")

Ids = NDArray[np.unsignedinteger]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three parts, each one sequence of words by their numbers."""

    vocabulary: tuple[str, ...]  # by number: the most frequent first
    train: Ids
    valid: Ids
    test: Ids

    def __post_init__(self) -> None:
        """Check that the parts have words, all of the vocabulary."""
        missing = {EOS, UNK}.difference(self.vocabulary)
        if missing or len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError(f"the vocabulary must have each word once, with {EOS} and {UNK}")
        for part, ids in zip(PARTS, self.parts, strict=True):
            if ids.ndim != 1 or ids.dtype.kind != "u" or not len(ids):
                raise ValueError(f"{part} must be numbers of words, got {ids.dtype} {ids.shape}")
            if ids.max() >= len(self.vocabulary):
                raise ValueError(
                    f"{part} has word {ids.max()}, the vocabulary {len(self.vocabulary)} words"
                )

    @property
    def parts(self) -> tuple[Ids, Ids, Ids]:
        """The three parts in the order of ``PARTS``."""
        return self.train, self.valid, self.test


def read_corpus(folder: Path) -> Corpus:
    """Read WikiText from the folder of its three files.

    Raises:
        FileNotFoundError: Naming the file that is not there.
        ValueError: Naming the file that is empty, cut off or no text.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing; a text is {', '.join(FILES)}")
    counts = Counter(_words(folder / FILES[0]))  # in the order in which words are first met
    vocabulary = [word for word, _ in counts.most_common()]
    vocabulary += [] if UNK in counts else [UNK]
    numbers = {word: number for number, word in enumerate(vocabulary)}
    return Corpus(tuple(vocabulary), *(_read_ids(folder / name, numbers) for name in FILES))


def _read_ids(path: Path, numbers: Mapping[str, int]) -> Ids:
    unknown, kind = numbers[UNK], _smallest_kind(len(numbers))
    return np.fromiter((numbers.get(word, unknown) for word in _words(path)), dtype=kind)


def _smallest_kind(num_words: int) -> type[np.unsignedinteger]:
    return np.uint16 if num_words <= 2**16 else np.uint32


def _words(path: Path) -> Iterator[str]:
    """Yield the words of a file, one line after the other."""
    file_size(path)
    some = False
    kind = "a whole text in UTF-8, with blanks between words"
    with (
        reading(path, kind, "get the whole file"),
        path.open(encoding="utf-8", newline="\n") as lines,
    ):
        for line in lines:
            if not line.endswith("\n"):
                raise ValueError("it ends within a line: is it cut off?")
            words = line.split()
            some = some or bool(words)
            yield from words
            yield EOS
        if not some:
            raise ValueError("it has no words")


def read_reviews(folder: Path, most_words: int = MOST_WORDS) -> Corpus:
    """Read IMDb's labelled reviews from the folder ``aclImdb``; see this module for the rules.

    Args:
        folder: With ``train`` and ``test``, whose reviews are split anew.
        most_words: Upper bound on the vocabulary.
    """
    films: dict[bytes, str] = {}
    for part in ("train", "test"):
        for text, film in reviews.filmed_reviews(folder, part):
            films.setdefault(text, film)
    numbers = {EOS: 0, UNK: 1}  # in the order in which words are first met
    parts: dict[str, list[NDArray[np.int32]]] = {part: [] for part in PARTS}
    for text, film in films.items():
        words = _LINE_BREAK.sub(" ", text.decode(errors="replace"))
        found = [numbers.setdefault(word, len(numbers)) for word in _WORD.findall(words)]
        parts[part_of_film(film)].append(np.array([*found, 0], dtype=np.int32))
    with reading(folder, "a folder of reviews of many films", "get the whole data set anew"):
        if empty := [part for part in PARTS if not parts[part]]:
            raise ValueError(f"none of its films is one of those to {', '.join(empty)}")
    joined = [np.concatenate(parts[part]) for part in PARTS]
    kept = _frequent(np.bincount(joined[0], minlength=len(numbers)), most_words)
    renumbered = np.full(len(numbers), kept.tolist().index(1), _smallest_kind(len(kept)))
    renumbered[kept] = np.arange(len(kept))
    names = list(numbers)
    vocabulary = tuple(names[number] for number in kept.tolist())
    return Corpus(vocabulary, *(renumbered[ids] for ids in joined))


def part_of_film(film: str) -> str:
    """Return the part that all reviews of a film are in, by a hash of its name."""
    tenth = int.from_bytes(hashlib.sha256(film.encode()).digest()[:8], "big") % 10
    return {8: "valid", 9: "test"}.get(tenth, "train")


def _frequent(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """The words to keep, the most frequent first; 0 is ``<eos>``, 1 ``<unk>``."""
    often = np.sort(counts[2:])[::-1]
    least = 1 if len(often) <= most - 2 else int(often[most - 2]) + 1
    is_kept = counts >= least
    counts[1] = counts[~is_kept].sum()
    is_kept[:2] = True
    return np.argsort(-np.where(is_kept, counts, -1), kind="stable")[: is_kept.sum()]


class Texts(PreparedSets[Corpus]):
    """The texts, of two or four bytes a word when prepared, with a checksum.

    The files of WikiText lie in ``<folder>/<name>``, as their archives unpack, the reviews in
    ``aclImdb``, there or beside the tasks of the Long Range Arena; or in a folder that is given.
    """

    domain, format = "language", "primal-attention language, version 1"
    names, noun = LANGUAGE_SETS, "text"

    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        inside = (reviews.FOLDER, f"lra/{reviews.FOLDER}") if name == IMDB else (name,)
        places = [each / place for each in data_folders(self.domain, folder) for place in inside]
        places += [] if folder is None else [Path(folder)]
        files = (reviews.FILMS,) if name == IMDB else FILES
        held = (each for each in places if any((each / file).is_file() for file in files))
        return next(held, None)

    def _read_files(self, name: str, place: Path) -> Corpus:
        return read_reviews(place) if name == IMDB else read_corpus(place)

    def _pack(self, found: Corpus) -> dict[str, Any]:
        words = "\n".join(found.vocabulary).encode()
        arrays = dict(zip(PARTS, found.parts, strict=True))
        vocabulary = np.frombuffer(words, dtype=np.uint8)
        return {"format": np.array(self.format), "vocabulary": vocabulary, **arrays}

    def _unpack(self, arrays: ArrayFile, name: str) -> Corpus:
        words = arrays["vocabulary"]
        if words.dtype != np.uint8 or words.size > _LARGEST:
            raise ValueError(f"its vocabulary is {words.size} values of {words.dtype}")
        vocabulary = tuple(words.tobytes().decode().split("\n"))
        return Corpus(vocabulary, *(arrays[part] for part in PARTS))

    def _advice(self, name: str, folder: Path | None) -> str:
        place = data_folders(self.domain, folder)[0]
        files, archive, put = ", ".join(FILES), f"the archive {name}-v1.zip", place / name
        if name == IMDB:
            files, archive, put = "train and test", reviews.ORIGIN, place / reviews.FOLDER
        return (
            f"{name}: no data. Put {files}, from {archive}, into {put}, "
            f"or a prepared {name}.npz into {place}"
        )


TEXTS = Texts()
find_language, load_language, prepare_language = TEXTS.find, TEXTS.load, TEXTS.prepare
