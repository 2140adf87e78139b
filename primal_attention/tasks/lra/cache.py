"""Prepared files of the Long Range Arena: tokens that a machine maps into memory as they are.

A file is an uncompressed ``.npz``: the tokens of all sequences, the target of each case, for tasks
on pairs which two sequences a case is about, and how all of it was made, with a checksum.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays, write_arrays
from primal_attention.foreign_files import reading

FORMAT = "primal-attention lra, version 1"


class PartSizes(NamedTuple):
    """How many cases each part has; they stand in this order."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A task as tokens.

    Letters: R sequences, N tokens, B cases.
    """

    task: str
    sizes: PartSizes
    tokens: NDArray[np.uint8]  # [R, N]
    targets: NDArray[np.uint8]  # [B]
    pairs: NDArray[np.int32] | None = None  # [B, 2] sequences, where a case has two
    facts: dict[str, Any] = field(default_factory=dict)  # how it was made, for JSON

    def __post_init__(self) -> None:
        """The arrays fit each other."""
        if not all(type(size) is int and size >= 0 for size in self.sizes):
            raise ValueError(f"sizes must be numbers of cases, got {self.sizes}")
        num_cases = sum(self.sizes)
        if self.tokens.ndim != 2 or self.tokens.dtype != np.uint8:
            raise ValueError(f"tokens must be uint8 [sequences, tokens], got {self.tokens.shape}")
        if self.targets.shape != (num_cases,) or self.targets.dtype != np.uint8:
            raise ValueError(f"targets must be {num_cases} uint8, got {self.targets.shape}")
        if self.pairs is None and len(self.tokens) != num_cases:
            raise ValueError(f"{len(self.tokens)} sequences for {num_cases} cases")
        if self.pairs is not None and self.pairs.shape != (num_cases, 2):
            raise ValueError(f"pairs must be [{num_cases}, 2], got {self.pairs.shape}")
        if self.pairs is not None and num_cases:
            if self.pairs.dtype != np.int32 or self.pairs.min() < 0:
                raise ValueError("pairs must be int32, and none negative")
            if self.pairs.max() >= len(self.tokens):
                raise ValueError(
                    f"pairs has sequence {self.pairs.max()}, there are {len(self.tokens)}"
                )

    def checksum(self) -> str:
        """The SHA-256 of all arrays and facts."""
        facts = json.dumps([self.task, self.sizes, self.tokens.shape, self.facts], sort_keys=True)
        digest = hashlib.sha256(facts.encode())
        for array in (self.tokens, self.targets, self.pairs):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def write_prepared(path: Path, prepared: Prepared) -> None:
    """Write a file; under another name first, so that a file of this name is always whole."""
    about = {
        "format": FORMAT,
        "task": prepared.task,
        "sizes": prepared.sizes,
        "shape": prepared.tokens.shape,
        "facts": prepared.facts,
        "sha256": prepared.checksum(),
    }
    arrays: dict[str, Any] = {
        "about": np.array(json.dumps(about)),
        "tokens": prepared.tokens,
        "targets": prepared.targets,
    }
    if prepared.pairs is not None:
        arrays["pairs"] = prepared.pairs
    write_arrays(path, arrays)


def read_prepared(path: Path, task: str) -> Prepared:
    """The task of a file; its tokens stay in the file until they are needed.

    Raises:
        ValueError: Naming the file, what is wrong with it and what to do.
    """
    remedy = f"delete it, and write it anew with prepare_lra({task!r}, ...)"
    with reading(path, f"a whole prepared file of {task!r}", remedy):
        prepared, told = _read(path)
        if prepared.task != task:
            raise ValueError(f"it holds the task {prepared.task!r}")
        if (found := prepared.checksum()) != told:
            raise ValueError(f"its checksum is {found[:12]}…, not {told[:12]}… as it says")
    return prepared


def _read(path: Path) -> tuple[Prepared, str]:
    """What a file holds, and the checksum it was written with."""
    with open_arrays(path) as arrays:
        about = json.loads(arrays.text("about"))
        if (found := about.get("format")) != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        prepared = Prepared(
            about["task"],
            PartSizes(*about["sizes"]),
            arrays.mapped("tokens"),
            arrays["targets"],
            arrays.get("pairs"),
            about["facts"],
        )
    return prepared, about["sha256"]
