r"""Ridge regression on features, solved in the dual, with its leave-one-out predictions.

With the kernel $K = \Phi \Phi^\top / F$ of $n$ cases the machine is a least-squares support vector
machine: $(K + \lambda W^{-1}) \alpha + 1 b = y$, $1^\top \alpha = 0$. Its leave-one-out residuals
are closed forms of the same inverse, so the regularisation is chosen without held-out cases.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PENALTIES = tuple(10 ** (power / 2) for power in range(-8, 3))
MOST_TO_CHOOSE = 1000  # cases; of more, so many choose the penalty


class Ridge(NamedTuple):
    """A linear machine on features [n, F]: ``features @ weights + bias`` of K outputs."""

    weights: Tensor  # [F, K]
    bias: Tensor  # [K]

    def __call__(self, features: Tensor) -> Tensor:
        """Compute outputs [n, K] in float64."""
        return (features @ self.weights).double() + self.bias

    @classmethod
    def fit(cls, features: Tensor, targets: Tensor, sample_weight: Tensor) -> tuple[Ridge, Tensor]:
        """Fit features [n, F] to targets [n, K]; return it with its predictions left one out."""
        n, F = features.shape
        kernel = (features @ features.T).double() / F
        targets, weight = targets.double(), sample_weight.double()
        chosen = torch.linspace(0, n - 1, min(n, MOST_TO_CHOOSE)).round().long()
        chosen = chosen.to(features.device)
        part = kernel[chosen][:, chosen], targets[chosen], weight[chosen]
        penalty = min(PENALTIES, key=lambda each: _error(*part, each))
        dual, bias, left_out = _solved(kernel, targets, weight, penalty)
        return cls(features.T @ (dual / F).to(features.dtype), bias), left_out


def _error(kernel: Tensor, targets: Tensor, weight: Tensor, penalty: float) -> float:
    """Mean squared error of cases left out."""
    left_out = _solved(kernel, targets, weight, penalty)[2]
    return float((weight[:, None] * (left_out - targets).square()).mean())


def _solved(
    kernel: Tensor, targets: Tensor, weight: Tensor, penalty: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dual variables [n, K], the bias [K] and predictions left one out [n, K]."""
    regular = kernel + torch.diag(penalty / weight)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(regular))
    rows = inverse.sum(1)
    bias = rows @ targets / rows.sum()
    dual = inverse @ (targets - bias)
    residuals = dual / (inverse.diagonal() - rows.square() / rows.sum())[:, None]
    return dual, bias, targets - residuals
