"""Prepared texts: the numbers of all words and the vocabulary in one `.npz`, with a checksum."""

import hashlib
from pathlib import Path

import numpy as np

from primal_attention.array_files import open_arrays, write_arrays
from primal_attention.foreign_files import reading
from primal_attention.tasks.language.corpus import PARTS, Corpus

FORMAT = "primal-attention language, version 1"
MOST = 2**24  # bytes of a vocabulary; that of WikiText-103 takes 2.3 million


def write_prepared(path: Path, corpus: Corpus) -> None:
    """Write a file; under another name first, so that a file of this name is always whole."""
    words = "\n".join(corpus.vocabulary).encode()
    write_arrays(
        path,
        {
            "format": np.array(FORMAT),
            "sha256": np.array(_checksum(corpus)),
            "vocabulary": np.frombuffer(words, dtype=np.uint8),
            **{part: getattr(corpus, part) for part in PARTS},
        },
    )


def read_prepared(path: Path) -> Corpus:
    """The text of a file.

    Raises:
        ValueError: Naming the file, what is wrong with it and what to do.
    """
    remedy = (
        f"delete it, and write it anew with prepare_language({path.stem!r}, <folder of its files>)"
    )
    with reading(path, "a whole prepared text", remedy), open_arrays(path) as arrays:
        if (found := arrays.text("format")) != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        words = arrays["vocabulary"]
        if words.dtype != np.uint8 or words.size > MOST:
            raise ValueError(f"its vocabulary is {words.size} values of {words.dtype}")
        corpus = Corpus(
            tuple(words.tobytes().decode().split("\n")), *(arrays[part] for part in PARTS)
        )
        if (found := _checksum(corpus)) != (told := arrays.text("sha256")):
            raise ValueError(f"its checksum is {found[:12]}…, not {told[:12]}… as it says")
    return corpus


def _checksum(corpus: Corpus) -> str:
    """The SHA-256 of all words."""
    digest = hashlib.sha256("\n".join(corpus.vocabulary).encode())
    for part in PARTS:
        digest.update(np.ascontiguousarray(getattr(corpus, part)).data)
    return digest.hexdigest()
