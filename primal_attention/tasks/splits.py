"""Held-out cases, class by class."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Split(NamedTuple):
    """Indices of the cases of both parts, in ascending order."""

    kept: NDArray[np.int64]
    held_out: NDArray[np.int64]


def stratified_split(labels: NDArray[Any], fraction: float, seed: int) -> Split:
    """Hold out about a fraction of the cases of each class.

    The number held out of a class is its share, rounded up or down so that the total comes nearest
    to the sum of the shares. Each class keeps at least one case; a class of one case keeps it.

    Args:
        labels: The class of each case, of any type that sorts.
        fraction: The share to hold out, between 0 and 1.
        seed: Of the choice of cases.
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0:
        raise ValueError(f"labels must be one label a case, got shape {labels.shape}")
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must lie between 0 and 1, got {fraction}")
    rng = np.random.default_rng(seed)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    held_out = np.zeros(len(labels), dtype=bool)
    for index, number in enumerate(_numbers_held_out(sizes, fraction, rng)):
        held_out[rng.permutation(np.flatnonzero(classes == index))[:number]] = True
    if not held_out.any():
        raise ValueError(
            f"fraction {fraction} of {len(labels)} cases in {len(sizes)} classes holds out none; "
            "take a larger fraction, or validate on the test cases"
        )
    return Split(np.flatnonzero(~held_out), np.flatnonzero(held_out))


def _numbers_held_out(
    sizes: NDArray[np.int64], fraction: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Round the shares of the classes so that their sum comes nearest, one case left of each."""
    most = sizes - 1
    shares = np.where(most > 0, fraction * sizes, 0.0)
    numbers: NDArray[np.int64] = np.minimum(np.floor(shares).astype(np.int64), most)
    remainders = np.where(numbers < most, shares - numbers, 0.0)
    missing = round(float(shares.sum())) - int(numbers.sum())
    by_remainder = np.lexsort((rng.permutation(len(sizes)), -remainders))  # equal ones at random
    by_remainder = by_remainder[remainders[by_remainder] > 0]
    numbers[by_remainder[: max(missing, 0)]] += 1
    return numbers
