"""ListOps in files: generated anew, or read from those of the Long Range Arena.

The original files are ``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv`` with columns
``Source``, such as ``( ( ( [MAX 2 ) 9 ) ] )``, and ``Target``.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size, reading
from primal_attention.tasks.lra.cache import PartSizes, Prepared
from primal_attention.tasks.lra.chunks import Progress, made_in_chunks, no_progress
from primal_attention.tasks.lra.listops import (
    LONGEST,
    NUM_TOKENS,
    SYMBOLS,
    ListOpsSettings,
    Trees,
    make_trees,
)

FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
SIZES = PartSizes(96_000, 2_000, 2_000)
CHUNK = 1_000
MOST = 200_000  # trees of a file, of 2 KiB each; the largest of the arena has 96,000
IDS = {symbol: i for i, symbol in enumerate(SYMBOLS, start=1)} | {"X": len(SYMBOLS)}


def generate_listops(
    folder: Path,
    *,
    sizes: PartSizes = SIZES,
    seed: int = 0,
    workers: int = 1,
    progress: Progress = no_progress,
) -> Prepared:
    """Different trees, as many as told; the same for any number of workers.

    Args:
        folder: For chunks that are done, until all are.
        sizes: Of the parts.
        seed: Of the trees.
        workers: Processes to share the work.
        progress: Called with chunks done and chunks in all.
    """
    settings, num = ListOpsSettings(), sum(sizes)
    make = partial(_chunk, settings, seed)
    shapes = (CHUNK, NUM_TOKENS), (CHUNK,)
    num_chunks = -(-num // CHUNK)
    while True:
        chunks = made_in_chunks(
            make, num_chunks, folder, shapes=shapes, workers=workers, progress=progress
        )
        trees = _different(Trees(*chunk) for chunk in chunks)
        if len(trees.values) >= num:
            break
        num_chunks += 1  # some tree was there already
    facts = {"made by": "generate_listops", "seed": seed, "settings": asdict(settings)}
    return Prepared("listops", sizes, trees.tokens[:num], trees.values[:num], facts=facts)


def _chunk(settings: ListOpsSettings, seed: int, index: int) -> Trees:
    return make_trees(settings, seed, index, CHUNK)


def _different(chunks: Iterable[Trees]) -> Trees:
    """The trees of all chunks, each once."""
    tokens, values = (np.concatenate(each) for each in zip(*chunks, strict=True))
    digests = [hashlib.blake2b(row, digest_size=16).digest() for row in tokens]
    first = sorted({digest: i for i, digest in reversed(list(enumerate(digests)))}.values())
    return (
        Trees(tokens[first], values[first]) if len(first) < len(values) else Trees(tokens, values)
    )


def read_listops(folder: Path) -> Prepared:
    """The trees of the three original files."""
    parts = [_read_tsv(folder / name) for name in FILES]
    tokens, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    sizes = PartSizes(*(len(part.values) for part in parts))
    return Prepared("listops", sizes, tokens, values, facts={"read from": list(FILES)})


def _read_tsv(path: Path) -> Trees:
    """The trees of one file; what is longer than 2,000 symbols is cut."""
    rows: list[NDArray[np.uint8]] = []
    values: list[int] = []
    file_size(path)
    with (
        reading(path, "a file of ListOps", "get the whole file anew"),
        path.open(encoding="utf-8") as file,
    ):
        if (head := file.readline(100).split()) != ["Source", "Target"]:
            raise ValueError(f"the first line must be Source, Target, got {head[:5]}")
        for number, line in enumerate(file, start=2):
            if len(rows) == MOST:
                raise ValueError(f"it has more than {MOST} trees")
            columns = line.rstrip("\r\n").split("\t")
            if len(columns) != 2:
                raise ValueError(f"line {number} has {len(columns)} columns, not Source and Target")
            rows.append(_tokens(columns[0], number))
            values.append(_digit(columns[1], number))
        if not rows:
            raise ValueError("it has no tree")
    return Trees(np.stack(rows), np.array(values, dtype=np.uint8))


def _tokens(source: str, line: int) -> NDArray[np.uint8]:
    """The ids of a text, padded."""
    symbols = source.replace("(", " ").replace(")", " ").split(maxsplit=LONGEST)[:LONGEST]
    if unknown := [symbol for symbol in symbols if symbol not in IDS]:
        raise ValueError(f"line {line} has {unknown[0][:20]!r}, which is no symbol of ListOps")
    ids = [IDS[symbol] for symbol in symbols]
    return np.array(ids + [0] * (NUM_TOKENS - len(ids)), dtype=np.uint8)


def _digit(value: str, line: int) -> int:
    if value not in tuple("0123456789"):
        raise ValueError(f"line {line}: Target must be a digit, got {value[:20]!r}")
    return int(value)
