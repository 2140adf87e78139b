"""Word-level text as it is handed out: ``wiki.train.tokens`` and its two companions.

Words stand between blanks, and each line ends in one more, ``<eos>``. The vocabulary is that of the
training part; a word that is not in it is ``<unk>``.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size

EOS, UNK = "<eos>", "<unk>"
PARTS = ("train", "valid", "test")
FILES = tuple(f"wiki.{part}.tokens" for part in PARTS)

Ids = NDArray[np.unsignedinteger]


@dataclass(frozen=True, eq=False)
class Corpus:
    """A text in three parts, each one sequence of words by their numbers."""

    vocabulary: tuple[str, ...]  # by number: the most frequent first
    train: Ids
    valid: Ids
    test: Ids

    def __post_init__(self) -> None:
        """The parts have words, all of the vocabulary."""
        missing = {EOS, UNK}.difference(self.vocabulary)
        if missing or len(set(self.vocabulary)) != len(self.vocabulary):
            raise ValueError(f"the vocabulary must have each word once, with {EOS} and {UNK}")
        for part in PARTS:
            ids: Ids = getattr(self, part)
            if ids.ndim != 1 or ids.dtype.kind != "u" or not len(ids):
                raise ValueError(f"{part} must be numbers of words, got {ids.dtype} {ids.shape}")
            if ids.max() >= len(self.vocabulary):
                raise ValueError(
                    f"{part} has word {ids.max()}, the vocabulary {len(self.vocabulary)} words"
                )


def read_corpus(folder: Path) -> Corpus:
    """The text of a folder with the three files.

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
    train, valid, test = (_read_ids(folder / name, numbers) for name in FILES)
    return Corpus(tuple(vocabulary), train, valid, test)


def _read_ids(path: Path, numbers: Mapping[str, int]) -> Ids:
    kind = np.uint16 if len(numbers) <= 2**16 else np.uint32
    unknown = numbers[UNK]
    ids: Ids = np.fromiter((numbers.get(word, unknown) for word in _words(path)), dtype=kind)
    return ids


def _words(path: Path) -> Iterator[str]:
    """The words of a file, one line after the other."""
    some = False
    file_size(path)
    with path.open(encoding="utf-8", newline="\n") as lines:
        for line in _decoded(path, lines):
            if not line.endswith("\n"):
                raise ValueError(f"{path} ends within a line: is it cut off? Get the whole file")
            words = line.split()
            some = some or bool(words)
            yield from words
            yield EOS
    if not some:
        raise ValueError(f"{path} has no words; a text with blanks between words was expected")


def _decoded(path: Path, lines: Iterator[str]) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}); get the whole file") from error
