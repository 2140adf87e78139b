"""Texts as tasks: predict every next word, each counted in exactly one window.

Letters: B windows of a batch, M windows of a text, N tokens, T words of the text, V of the
vocabulary.
"""

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.language.corpus import EOS, Ids, load_language
from primal_attention.tasks.language.losses import token_losses
from primal_attention.tasks.task import Cases, Goal, Sizes, Task

IGNORED = -100  # the target where a word is not counted


def _window_losses(outputs: Tensor, target: Tensor) -> Tensor:
    """The losses of all counted words of each window, [B], in parts of a whole window."""
    return token_losses(outputs, target).mean(-1)


def _counted(target: Tensor) -> Tensor:
    """The part of each window that counts, [B]."""
    return (target >= 0).double().mean(-1)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # so has a loss that is not a number


PERPLEXITY = Goal(
    _window_losses,
    _window_losses,
    "perplexity",
    _perplexity,
    higher_is_better=False,
    weights=_counted,
)


def language_task(
    name: str, *, folder: Path | None = None, num_tokens: int = 512, context_tokens: int = 0
) -> Task:
    """Make a task of a text; a model is called with ``ids`` [B, N] and answers with [B, N, V].

    The metric is exp of the mean loss of a word, ``<eos>`` at the end of each line included.

    Args:
        name: One of ``LANGUAGE_SETS``.
        folder: Of the data, see ``load_language``.
        num_tokens: Tokens N of a window.
        context_tokens: How many tokens, at least, come before a word that an evaluation counts,
            but for those of the first window. Training counts every word of a window.
    """
    corpus = load_language(name, folder)
    first = corpus.vocabulary.index(EOS)
    train = text_windows(corpus.train, num_tokens, first=first)
    valid, test = (
        text_windows(text, num_tokens, context_tokens=context_tokens, first=first)
        for text in (corpus.valid, corpus.test)
    )
    num_words = len(corpus.vocabulary)
    sizes = Sizes(num_tokens, num_words, vocab_size=num_words)
    return Task(f"language/{name}", PERPLEXITY, sizes, train, valid, test, corpus.vocabulary)


def text_windows(text: Ids, num_tokens: int, *, context_tokens: int = 0, first: int = 0) -> Cases:
    """Cut a text into windows ``ids`` [M, N], with the next words as ``target`` [M, N].

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
