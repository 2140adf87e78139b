"""Prepared texts: the numbers of all words and the vocabulary in one `.npz`, with a checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from primal_attention.tasks.language.corpus import PARTS, Corpus
from primal_attention.tasks.lra.cache import write_arrays
from primal_attention.tasks.prepared import WRONG_FILE

FORMAT = "primal-attention language, version 1"


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
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if (found := str(arrays["format"])) != FORMAT:
                raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
            vocabulary = tuple(arrays["vocabulary"].tobytes().decode().split("\n"))
            corpus = Corpus(vocabulary, *(arrays[part] for part in PARTS))
            if (found := _checksum(corpus)) != (told := str(arrays["sha256"])):
                raise ValueError(f"its checksum is {found[:12]}…, not {told[:12]}… as it says")
    except WRONG_FILE as error:
        raise ValueError(
            f"{path} is not a whole prepared text ({error}); delete it, and write it anew with "
            f"prepare_language({path.stem!r}, <folder of its files>)"
        ) from error
    return corpus


def _checksum(corpus: Corpus) -> str:
    """The SHA-256 of all words."""
    digest = hashlib.sha256("\n".join(corpus.vocabulary).encode())
    for part in PARTS:
        digest.update(np.ascontiguousarray(getattr(corpus, part)).data)
    return digest.hexdigest()
