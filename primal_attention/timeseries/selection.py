"""Choosing a preset on the training cases."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from primal_attention.timeseries.parameters import PRESETS


class PresetSelection(NamedTuple):
    """The preset that did best, and what all did on each fold."""

    preset: str
    accuracies: dict[str, list[float]]
    seeds: list[int]  # of the folds


def select_preset(
    X: Any,
    y: Any,
    presets: Sequence[str] = tuple(PRESETS),
    *,
    folds: int = 3,
    random_state: int = 0,
    **parameters: Any,
) -> PresetSelection:
    """Choose the preset of a classifier by cross-validation; of equal ones the first.

    Args:
        X: Series, as ``fit`` takes them.
        y: Their classes, each of at least as many cases as there are folds.
        presets: To choose from, cheapest first.
        folds: Each is held out once.
        random_state: Of the folds; that of the classifier on a fold is this and the fold's number.
        **parameters: Of the classifier.
    """
    from sklearn.model_selection import StratifiedKFold

    from primal_attention import timeseries

    y = np.asarray(y)
    splits = list(
        StratifiedKFold(folds, shuffle=True, random_state=random_state).split(np.zeros(len(y)), y)
    )
    seeds = [random_state + fold for fold in range(folds)]

    def accuracy(preset: Any, seed: int, kept: Any, held_out: Any) -> float:
        classifier = timeseries.PrimalFormerClassifier(
            preset=preset, random_state=seed, **parameters
        )
        classifier.fit([X[i] for i in kept], y[kept])
        return float(np.mean(classifier.predict([X[i] for i in held_out]) == y[held_out]))

    accuracies = {
        preset: [accuracy(preset, seed, *split) for seed, split in zip(seeds, splits, strict=True)]
        for preset in presets
    }
    best = max(presets, key=lambda preset: np.mean(accuracies[preset]))
    return PresetSelection(best, accuracies, seeds)
