"""Retrieval: does a paper cite the other? From the ACL Anthology Network (Radev et al., 2013).

The original files are ``new_aan_pairs.{train,eval,test}.tsv``, without a head, with columns label,
two ids and two texts. Their text must not be passed on; ``retrieval_imdb`` is a task like it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from primal_attention.foreign_files import file_size
from primal_attention.tasks.lra.byte_tokens import LONGEST, byte_tokens
from primal_attention.tasks.lra.cache import PartSizes, Prepared

FILES = tuple(f"new_aan_pairs.{part}.tsv" for part in ("train", "eval", "test"))
MOST = 200_000  # texts, of 4 KiB each; the network has some 20,000 papers
LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


def read_retrieval(folder: Path) -> Prepared:
    """The pairs of the three original files; each text is kept once."""
    rows: dict[bytes, int] = {}
    pairs: list[tuple[int, int]] = []
    labels: list[int] = []
    ends: list[int] = []
    for name in FILES:
        for label, one, other in _pairs(folder / name):
            pairs.append((rows.setdefault(one, len(rows)), rows.setdefault(other, len(rows))))
            labels.append(label)
            if len(rows) > MOST:
                raise ValueError(f"{folder / name} has more than {MOST} texts; is it another file?")
        if len(labels) == (ends[-1] if ends else 0):
            raise ValueError(f"{folder / name} has no pair; get the whole file anew")
        ends.append(len(labels))
    train, valid, test = np.diff([0, *ends]).tolist()
    return Prepared(
        "retrieval",
        PartSizes(train, valid, test),
        byte_tokens(list(rows)),
        np.array(labels, dtype=np.uint8),
        np.array(pairs, dtype=np.int32),
        facts={"read from": list(FILES)},
    )


def _pairs(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """Label and texts, as far as they count, of each line; files are larger than memory may be."""
    file_size(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != 5 or columns[0] not in LABELS:
                raise ValueError(
                    f"{path}, line {number}: expected label (0 or 1), id, id, text, text, got "
                    f"{len(columns)} columns, the first {columns[0][:20]!r}; get the file anew"
                )
            one, other = (column[:LONGEST] for column in columns[3:])
            if b"\xff" in one + other:
                raise ValueError(
                    f"{path}, line {number}: byte 255 is no text in UTF-8; get the file anew"
                )
            yield LABELS[columns[0]], one, other
