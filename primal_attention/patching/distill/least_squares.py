"""Least squares from streamed sums: ridge, and reduced rank in blocks.

Only second moments of the data are kept, in float64: no feature and no target is.

Letters: T tokens, F features, D outputs, K blocks, R numbers of a block.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties to choose from, as fractions of each feature's own second moment."""

_SWEEPS = 4


class Moments(NamedTuple):
    """Second moments of features and targets."""

    gram: Tensor  # [F, F]
    cross: Tensor  # [F, D]


class StreamedSums:
    """Sums over tokens of features [T, F] and targets [T, D], in two halves.

    Args:
        centred: Moments are those of the differences from the means.
    """

    def __init__(self, *, centred: bool):
        self.centred = centred
        self._halves: list[Tensor | None] = [None, None]  # of [1, feature, target] with itself
        self._num_features = 0

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Count more tokens in, with the half that has fewer."""
        self._num_features = features.shape[1]
        z = F.pad(torch.cat([features.double(), targets.double()], 1), (1, 0), value=1.0)
        counts = [0.0 if half is None else float(half[0, 0]) for half in self._halves]
        place = counts.index(min(counts))
        half = self._halves[place]
        self._halves[place] = z.mT @ z if half is None else half.addmm_(z.mT, z)

    def moments(self) -> Moments:
        """Return the second moments."""
        return self._moments(self._whole())

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of features [F] and of targets [D]."""
        sums = self._whole()[0]
        features, targets = sums[1:].tensor_split([self._num_features])
        return features / sums[0], targets / sums[0]

    def penalty(self) -> float:
        """Choose the ridge penalty with which each half predicts the other best."""
        halves = [self._moments(half) for half in self._halves if half is not None]
        if len(halves) < 2:
            return PENALTIES[-1]

        def error(penalty: float) -> float:  # up to the sum of squares of the targets
            maps = [ridge(half, penalty) for half in halves]
            pairs = zip(maps, reversed(halves), strict=True)
            return sum(float((w * (seen.gram @ w - 2 * seen.cross)).sum()) for w, seen in pairs)

        return min(PENALTIES, key=error)

    def _whole(self) -> Tensor:
        return torch.stack([half for half in self._halves if half is not None]).sum(0)

    def _moments(self, sums: Tensor) -> Moments:
        if self.centred:
            sums = sums - torch.outer(sums[0], sums[0]) / sums[0, 0].clamp(min=1)
        return Moments(*sums[1 : 1 + self._num_features, 1:].tensor_split([self._num_features], 1))


def ridge(moments: Moments, penalty: float) -> Tensor:
    """Find the map [F, D] from features to targets with the least penalised squared error."""
    gram, cross = moments
    scale = gram.diagonal().clamp(min=1e-300).sqrt()
    correlation = gram / torch.outer(scale, scale)
    correlation.diagonal().add_(penalty)
    standard: Tensor = torch.linalg.solve(correlation, cross / scale[:, None])
    return standard / scale[:, None]


def reduced_rank(moments: Moments, num_inner: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Fit by ridge regression through R numbers: maps [F, R] and [R, D], with orthonormal rows."""
    full = ridge(moments, penalty)
    energy = full.mT @ moments.gram @ full
    leading = torch.linalg.eigh(energy).eigenvectors[:, -num_inner:].flip(-1)
    return full @ leading, leading.mT


def low_rank_blocks(moments: Moments, num_blocks: int, num_inner: int, penalty: float) -> Tensor:
    """Find maps [K, F, R] whose blocks of numbers, put side by side, predict the targets well.

    Each block in turn is fitted to what the others leave, and all of them in several sweeps. The
    moments are of all features at once, [K F, K F] and [K F, D].
    """
    width, D = moments.gram.shape[-1] // num_blocks, moments.cross.shape[-1]
    maps = moments.cross.new_zeros(num_blocks, width, D)
    inner = moments.cross.new_zeros(num_blocks, width, num_inner)
    for block in [*range(num_blocks)] * _SWEEPS:
        rows = slice(block * width, (block + 1) * width)
        gram = moments.gram[rows, rows]
        explained = moments.gram[rows] @ maps.flatten(0, 1) - gram @ maps[block]
        left = Moments(gram, moments.cross[rows] - explained)
        inner[block], outer = reduced_rank(left, num_inner, penalty)
        maps[block] = inner[block] @ outer
    return inner
