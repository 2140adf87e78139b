"""Windows of text or sound from folders that are larger than memory.

The order of the windows is a function of the seed and the epoch alone, and a place in it is one
number, so a stream goes on where it was, with another number of processes too. A process opens a
file for the tokens that it is about to give, and reads no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primal_attention.foreign_files import file_size
from primal_attention.tasks.wav_files import read_wav, wav_length


@dataclass(frozen=True)
class Share:
    """One of so many equal shares."""

    index: int = 0
    number: int = 1


WHOLE = Share()


class FolderStream:
    """Windows of all files of a folder in a random order, without end.

    Text is bytes, int64 [tokens]; sound, from WAV files, float32 [tokens, channels] within -1 and
    1. What is left over at the end of a file is no window.

    Args:
        folder: Searched for files with its folders.
        kind: ``text`` (``*.txt``) or ``audio`` (``*.wav``).
        num_tokens: Tokens of a window.
        seed: Of the order.
        cases: This process's share of the windows, every so many-th.
        tokens: Its share of each window, where processes share sequences (``shard_context``).
        following: How many tokens more come with each share, such as the next one to predict.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        num_tokens: int,
        *,
        seed: int = 0,
        cases: Share = WHOLE,
        tokens: Share = WHOLE,
        following: int = 0,
    ):
        if kind not in _KINDS:
            raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
        if num_tokens < tokens.number:
            raise ValueError(
                f"num_tokens must be at least the {tokens.number} shares of a window, "
                f"got {num_tokens}"
            )
        pattern, self._length, self._read = _KINDS[kind]
        self.files = sorted(folder.rglob(pattern))
        windows = [max(self._length(path) - following, 0) // num_tokens for path in self.files]
        if not sum(windows):
            raise ValueError(
                f"{folder} has no {pattern} of {num_tokens + following} tokens; put longer files "
                f"there or choose a smaller num_tokens"
            )
        self.num_tokens, self.seed, self.cases = num_tokens, seed, cases
        self.ends = np.cumsum(windows)  # windows up to the end of each file
        begin, end = (num_tokens * (tokens.index + i) // tokens.number for i in (0, 1))
        self.own = slice(begin, end + following)
        self.position = 0  # windows that all processes together have passed

    def __len__(self) -> int:
        """Count the windows of an epoch, of all processes."""
        return int(self.ends[-1])

    def __iter__(self) -> Iterator[Tensor]:
        """Yield this process's tokens of its windows, from the place where the stream is."""
        epoch, order = -1, np.zeros(0, np.int64)
        while True:
            found, place = divmod(self.position + self.cases.index, len(self))
            if found != epoch:
                epoch, order = (
                    found,
                    np.random.default_rng([self.seed, found]).permutation(len(self)),
                )
            self.position += self.cases.number
            yield self._window(int(order[place]))

    def state_dict(self) -> dict[str, int]:
        """Return the place of the stream, for ``load_state_dict``."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place; the number of processes may be another."""
        self.position = state["position"]

    def _window(self, number: int) -> Tensor:
        file = int(np.searchsorted(self.ends, number, side="right"))
        before = int(self.ends[file - 1]) if file else 0
        first = (number - before) * self.num_tokens
        tokens: Tensor = self._read(self.files[file], first + self.own.start, first + self.own.stop)
        return tokens


def _read_text(path: Path, begin: int, end: int) -> Tensor:
    with path.open("rb") as file:
        file.seek(begin)
        text = np.frombuffer(file.read(end - begin), np.uint8)
    return torch.from_numpy(text.astype(np.int64))


def _read_sound(path: Path, begin: int, end: int) -> Tensor:
    return torch.from_numpy(read_wav(path, begin, end))


_KINDS: dict[str, Any] = {
    "text": ("*.txt", file_size, _read_text),
    "audio": ("*.wav", wav_length, _read_sound),
}
