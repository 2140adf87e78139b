"""Texts as tasks: predict every next word.

Letters: B windows, N tokens, V words of the vocabulary.
"""

import math
from pathlib import Path

from torch import Tensor

from primal_attention.tasks.language.corpus import EOS
from primal_attention.tasks.language.losses import token_losses
from primal_attention.tasks.language.sources import load_language
from primal_attention.tasks.language.windows import text_windows
from primal_attention.tasks.task import Goal, Sizes, Task


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
    """A text; a model is called with ``ids`` [B, N] and answers with logits [B, N, V].

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
