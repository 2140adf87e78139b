"""Associative recall: read back the value that stood behind each key.

A sequence lists pairs of a key and a value, then asks for every key once, at places drawn among
the tokens that are left; between the questions stand blanks. The model predicts the value that
follows each question. A softmax layer can point at the pair; a state of constant size has to hold
all pairs at once.

Letters: M cases, N tokens, K pairs.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.tasks.language.losses import token_losses
from primal_attention.tasks.task import Cases, Goal, Sizes, Task

RECALL_SETS = ("4", "8", "16", "32", "64")  # by the number of pairs
NUM_KEYS = NUM_VALUES = 1023
VOCAB_SIZE = 1 + NUM_KEYS + NUM_VALUES  # 0 is the blank
NUM_TRAIN, NUM_VALID, NUM_TEST = 65_536, 1_024, 2_048
IGNORED = -100  # the target where nothing is asked


def _losses(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of the answers of each case, [M]."""
    return token_losses(outputs, target).sum(-1) / _asked(target).sum(-1)


def _scores(outputs: Tensor, target: Tensor) -> Tensor:
    """Return the share of right answers of each case, [M]."""
    right = (outputs.argmax(-1) == target) & _asked(target)
    return right.sum(-1) / _asked(target).sum(-1)


def _asked(target: Tensor) -> Tensor:
    return target >= 0


RECALL = Goal(_losses, _scores, "accuracy", lambda mean: 100 * mean, higher_is_better=True)


def recall_task(
    name: str,
    *,
    num_tokens: int = 512,
    sizes: tuple[int, int, int] = (NUM_TRAIN, NUM_VALID, NUM_TEST),
    seed: int = 0,
) -> Task:
    """Generate a task; a model is called with ``ids`` [M, N] and answers with logits [M, N, V].

    Args:
        name: The number K of pairs.
        num_tokens: Tokens N of a sequence, at least 3 K.
        sizes: Numbers of training, validation and test cases.
        seed: Of the cases; those to validate on and to test are the same for every seed.
    """
    if not name.isascii() or not name.isdigit() or int(name) < 1:
        raise ValueError(f"a set of recall is a number of pairs, at least 1, got {name!r}")
    num_train, num_valid, num_test = sizes
    parts = (num_train, (seed, 0)), (num_valid, (0, 1)), (num_test, (0, 2))
    train, valid, test = (
        recall_cases(number, int(name), num_tokens, np.random.default_rng(seeds))
        for number, seeds in parts
    )
    shape = Sizes(num_tokens, VOCAB_SIZE, vocab_size=VOCAB_SIZE)
    return Task(f"recall/{name}", RECALL, shape, train, valid, test)


def recall_cases(
    num_cases: int, num_pairs: int, num_tokens: int, rng: np.random.Generator
) -> Cases:
    """Draw cases ``ids`` [M, N] with the values asked for as ``target`` [M, N].

    Keys of a case differ, values may repeat; questions come in random order.
    """
    M, K, N = num_cases, num_pairs, num_tokens
    if K > NUM_KEYS or N < 3 * K:
        raise ValueError(
            f"{K} pairs need at least {3 * K} tokens and {K} keys, "
            f"got num_tokens={N} and {NUM_KEYS} keys"
        )
    keys = 1 + _distinct(M, K, NUM_KEYS, rng)
    values = 1 + NUM_KEYS + rng.integers(NUM_VALUES, size=(M, K))
    places = 2 * K + _distinct(M, K, N - 2 * K, rng)  # in no order, so neither are the questions
    ids = np.zeros((M, N), np.int32)
    ids[:, : 2 * K : 2], ids[:, 1 : 2 * K : 2] = keys, values
    np.put_along_axis(ids, places, keys.astype(np.int32), 1)
    target = np.full((M, N), IGNORED, np.int32)
    np.put_along_axis(target, places, values.astype(np.int32), 1)
    return Cases({"ids": torch.from_numpy(ids)}, torch.from_numpy(target))


def _distinct(rows: int, count: int, number: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw so many different numbers below another one for each row, in random order."""
    drawn = np.empty((rows, count), np.int64)
    for start in range(0, rows, 4096):  # bounds the memory of the random numbers
        block = rng.random((min(4096, rows - start), number))
        chosen = np.argpartition(block, count - 1, axis=1)[:, :count]
        drawn[start : start + 4096] = rng.permuted(chosen, axis=1)
    return drawn
