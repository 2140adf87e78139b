"""A task of the Long Range Arena as tokens, and the sizes of its parts."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class PartSizes(NamedTuple):
    """How many cases each part has; they stand in this order."""

    train: int
    valid: int
    test: int


@dataclass(frozen=True, eq=False)
class PreparedTask:
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
        """Compute the SHA-256 of all arrays and facts."""
        facts = json.dumps([self.task, self.sizes, self.tokens.shape, self.facts], sort_keys=True)
        digest = hashlib.sha256(facts.encode())
        for array in (self.tokens, self.targets, self.pairs):
            if array is not None:
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()
