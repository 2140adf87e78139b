"""Prepared files of the Long Range Arena: tokens that a machine maps into memory as they are.

A file is an uncompressed ``.npz``: the tokens of all sequences, the target of each case, for tasks
on pairs which two sequences a case is about, and how all of it was made, with a checksum.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.prepared import WRONG_FILE
from primal_attention.whole_files import replacing

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
        num_cases = sum(self.sizes)
        if self.tokens.ndim != 2 or self.tokens.dtype != np.uint8:
            raise ValueError(f"tokens must be uint8 [sequences, tokens], got {self.tokens.shape}")
        if self.targets.shape != (num_cases,) or self.targets.dtype != np.uint8:
            raise ValueError(f"targets must be {num_cases} uint8, got {self.targets.shape}")
        if self.pairs is None and len(self.tokens) != num_cases:
            raise ValueError(f"{len(self.tokens)} sequences for {num_cases} cases")
        if self.pairs is not None and self.pairs.shape != (num_cases, 2):
            raise ValueError(f"pairs must be [{num_cases}, 2], got {self.pairs.shape}")

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


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write arrays to an ``.npz`` that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as incoming, incoming.open("wb") as file:
        np.savez(file, **arrays)


def read_prepared(path: Path, task: str) -> Prepared:
    """The task of a file; its tokens stay in the file until they are needed.

    Raises:
        ValueError: Naming the file, what is wrong with it and what to do.
    """
    try:
        prepared, told = _read(path)
        if prepared.task != task:
            raise ValueError(f"it holds the task {prepared.task!r}")
        if (found := prepared.checksum()) != told:
            raise ValueError(f"its checksum is {found[:12]}…, not {told[:12]}… as it says")
    except WRONG_FILE as error:
        raise ValueError(
            f"{path} is not a whole prepared file of {task!r} ({error}); delete it, and write it "
            f"anew with prepare_lra({task!r}, ...)"
        ) from error
    return prepared


def _read(path: Path) -> tuple[Prepared, str]:
    """What a file holds, and the checksum it was written with."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        if (found := about.get("format")) != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        targets = arrays["targets"]
        pairs = arrays.get("pairs")
    sizes, tokens = PartSizes(*about["sizes"]), _mapped(path, "tokens", tuple(about["shape"]))
    prepared = Prepared(about["task"], sizes, tokens, targets, pairs, about["facts"])
    return prepared, about["sha256"]


def _mapped(path: Path, name: str, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """An array of an uncompressed ``.npz``, mapped into memory; changes are not written back."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed")
        file.seek(member.header_offset + 26)  # to the lengths of the two last fields of its head
        lengths = np.frombuffer(file.read(4), dtype="<u2")
        end = file.tell() + int(lengths.sum()) + member.file_size
        return np.memmap(file, np.uint8, mode="c", offset=end - shape[0] * shape[1], shape=shape)
