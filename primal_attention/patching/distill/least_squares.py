"""Least squares from streamed sums: ridge, and reduced rank in blocks.

Only second moments of the data are kept, in float64: no feature and no target is.

Letters: T tokens, F features, D outputs, K blocks, R numbers of a block.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Ridge penalties to choose from, as fractions of each feature's own second moment."""

_SWEEPS = 4


class Moments(NamedTuple):
    """Second moments of features and targets."""

    gram: Tensor  # [F, F]
    cross: Tensor  # [F, D]


class StreamedSums:
    """Sums over tokens of features [T, F] and targets [T, D], in two halves."""

    def __init__(self) -> None:
        self._halves = [_Sums(), _Sums()]

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Count more tokens in, with the half that has fewer."""
        f, y = features.double(), targets.double()
        half = min(self._halves, key=lambda half: half.num_tokens)
        half.add(_Sums(len(y), [f.mT @ f, f.mT @ y, f.sum(0), y.sum(0)]))

    def moments(self, *, centred: bool) -> Moments:
        """Return the second moments; of the differences from the means where ``centred``."""
        return self._whole().moments(centred=centred)

    def means(self) -> tuple[Tensor, Tensor]:
        """Return the means of features [F] and of targets [D]."""
        whole = self._whole()
        return whole.sums[2] / whole.num_tokens, whole.sums[3] / whole.num_tokens

    def penalty(self, *, centred: bool) -> float:
        """Choose the ridge penalty with which each half predicts the other best."""
        one, other = self._halves
        if not other.num_tokens:
            return PENALTIES[-1]
        halves = one.moments(centred=centred), other.moments(centred=centred)

        def error(penalty: float) -> float:  # up to the sum of squares of the targets
            maps = [ridge(half, penalty) for half in halves]
            pairs = zip(maps, reversed(halves), strict=True)
            return sum(float((w * (seen.gram @ w - 2 * seen.cross)).sum()) for w, seen in pairs)

        return min(PENALTIES, key=error)

    def _whole(self) -> "_Sums":
        whole = _Sums()
        for half in self._halves:
            whole.add(half)
        return whole


class _Sums:
    def __init__(self, num_tokens: int = 0, sums: list[Any] | None = None):
        self.num_tokens = num_tokens
        self.sums = sums or [0.0] * 4

    def add(self, other: "_Sums") -> None:
        self.num_tokens += other.num_tokens
        self.sums = [a + b for a, b in zip(self.sums, other.sums, strict=True)]

    def moments(self, *, centred: bool) -> Moments:
        gram, cross, f, y = self.sums
        if not centred:
            return Moments(gram, cross)
        n = max(self.num_tokens, 1)
        return Moments(gram - torch.outer(f, f) / n, cross - torch.outer(f, y) / n)


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
    F, D = moments.gram.shape[-1] // num_blocks, moments.cross.shape[-1]
    maps = moments.cross.new_zeros(num_blocks, F, D)
    inner = moments.cross.new_zeros(num_blocks, F, num_inner)
    for block in [*range(num_blocks)] * _SWEEPS:
        rows = slice(block * F, (block + 1) * F)
        gram = moments.gram[rows, rows]
        explained = moments.gram[rows] @ maps.flatten(0, 1) - gram @ maps[block]
        left = Moments(gram, moments.cross[rows] - explained)
        inner[block], outer = reduced_rank(left, num_inner, penalty)
        maps[block] = inner[block] @ outer
    return inner


def compressed(moments: Moments, inner: Tensor) -> Moments:
    """Return the moments of the features after block maps [K, F, R]."""
    whole = block_diagonal(inner)
    return Moments(whole.mT @ moments.gram @ whole, whole.mT @ moments.cross)


def block_diagonal(blocks: Tensor) -> Tensor:
    """Put blocks [K, F, R] along the diagonal of one matrix [K F, K R]."""
    whole: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return whole
