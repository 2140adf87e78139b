"""A text as cases: windows of it, in which every word is a target exactly once.

Letters: T words of the text, M windows, N tokens of a window.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from primal_attention.tasks.language.corpus import Ids
from primal_attention.tasks.task import Cases

IGNORED = -100  # the target where a word is not counted


def text_windows(text: Ids, num_tokens: int, *, context_tokens: int = 0, first: int = 0) -> Cases:
    """Windows ``ids`` [M, N] of a text, and the next word of each token as ``target`` [M, N].

    Each window begins N - ``context_tokens`` words after the one before it and counts the words
    that are new in it: they have at least ``context_tokens`` tokens before them. The last window
    begins earlier, so that it is full; nothing is padded. A text shorter than a window is one.

    Args:
        text: The numbers of all words [T].
        num_tokens: N.
        context_tokens: Tokens of a window, after the first one, that are read and not counted.
        first: What the first word is predicted from.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if not 0 <= context_tokens < num_tokens:
        raise ValueError(
            f"context_tokens must be at least 0 and below num_tokens={num_tokens}, "
            f"got {context_tokens}"
        )
    words = np.concatenate([[first], text]).astype(np.int32)
    ends = _ends(len(text), min(num_tokens, len(text)), num_tokens - context_tokens)
    places = ends[:, None] + np.arange(-ends[0], 0)  # [M, N]
    counted = places >= np.concatenate([[0], ends[:-1]])[:, None]
    target = np.where(counted, words[places + 1], np.int32(IGNORED))
    return Cases({"ids": torch.from_numpy(words[places])}, torch.from_numpy(target))


def _ends(num_words: int, length: int, step: int) -> NDArray[np.int64]:
    """Where each window ends, [M]."""
    num_windows = 1 + -(-(num_words - length) // step)
    ends: NDArray[np.int64] = np.minimum(length + step * np.arange(num_windows), num_words)
    return ends
