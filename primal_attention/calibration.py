"""How far the probabilities of a classifier can be trusted, and a temperature that mends them.

Letters: n cases, K classes.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Calibration(NamedTuple):
    """Measures of probabilities on cases; all but the accuracy are better if lower."""

    accuracy: float
    ece: float  # expected calibration error: how far confidence is from accuracy
    nll: float  # negative log-likelihood of a case, in nats
    brier: float  # squared error of the probabilities, summed over the classes
    aurc: float  # area under the risk-coverage curve: errors where only the surest are answered


def calibration(probabilities: Tensor, labels: Tensor, *, num_bins: int = 15) -> Calibration:
    """Measure probabilities [n, K] of classes against labels [n], in float64.

    The ECE has ``num_bins`` bins of confidence of equal width.
    """
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or not len(labels):
        raise ValueError(
            f"probabilities must be [n, K] and labels [n] with n > 0, got "
            f"{list(probabilities.shape)} and {list(labels.shape)}"
        )
    probabilities = probabilities.double()
    confidence, predicted = probabilities.max(1)
    right = (predicted == labels).double()
    bins = (confidence * num_bins).ceil().long().clamp(1, num_bins) - 1
    gaps = torch.zeros(num_bins, dtype=torch.float64, device=bins.device)
    gaps.index_add_(0, bins, right - confidence)
    truth = F.one_hot(labels, probabilities.shape[1])
    surest_first = 1 - right[confidence.argsort(descending=True, stable=True)]
    answered = torch.arange(1, len(right) + 1, device=right.device)
    return Calibration(
        accuracy=float(right.mean()),
        ece=float(gaps.abs().sum() / len(right)),
        nll=float(-probabilities.gather(1, labels[:, None]).log().mean()),
        brier=float((probabilities - truth).square().sum(1).mean()),
        aurc=float((surest_first.cumsum(0) / answered).mean()),
    )


def fit_temperature(logits: Tensor, labels: Tensor, *, limit: float = 100.0) -> float:
    """Find the T with the least NLL of softmax(logits / T), of held-out logits [n, K].

    The NLL is convex in 1 / T, so its slope is bisected, between 1 / ``limit`` and ``limit``.
    """
    logits = logits.double()
    hit = logits.gather(1, labels[:, None])[:, 0]
    low, high = -math.log(limit), math.log(limit)
    for _ in range(50):
        middle = (low + high) / 2
        expected = ((logits * math.exp(-middle)).softmax(1) * logits).sum(1)
        if (expected - hit).mean() > 0:  # the NLL falls with a lower 1 / T
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
