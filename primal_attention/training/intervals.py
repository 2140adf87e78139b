"""Means over seeds and how far they can be trusted."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


class Estimate(NamedTuple):
    """A mean over seeds with its confidence interval, mean ± margin."""

    mean: float
    margin: float | None  # none from a single seed
    seeds: int
    variance: float | None  # of the mean
    freedom: float | None  # degrees of freedom of that variance

    def __str__(self) -> str:
        margin = "" if self.margin is None else f" ± {self.margin:.1f}"
        return f"{self.mean:.1f}{margin} ({self.seeds})"


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of runs that differ in the seed, with the interval of Student's t."""
    count = len(values)
    if count < 2:
        return Estimate(fmean(values), None, count, None, None)
    variance = stdev(values) ** 2 / count
    return _estimate(fmean(values), count, variance, count - 1)


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of several estimates, each from runs of its own (Welch and Satterthwaite)."""
    mean, seeds = fmean(each.mean for each in estimates), min(each.seeds for each in estimates)
    known = [(v, f) for *_, v, f in estimates if v is not None and f is not None]
    if len(known) < len(estimates):
        return Estimate(mean, None, seeds, None, None)
    total = sum(variance for variance, _ in known)
    spread = sum(variance**2 / freedom for variance, freedom in known)
    freedom = total**2 / spread if spread else 1.0
    return _estimate(mean, seeds, total / len(known) ** 2, freedom)


def _estimate(mean: float, seeds: int, variance: float, freedom: float) -> Estimate:
    margin = t_quantile(freedom) * math.sqrt(variance)
    return Estimate(mean, margin, seeds, variance, freedom)


def t_quantile(freedom: float, confidence: float = CONFIDENCE) -> float:
    r"""The t with $P(|T| \le t)$ equal to the confidence.

    With $t = \sqrt{\nu} \tan\theta$ that probability is an integral of $\cos^{\nu-1}$ from 0 to
    $\theta$; the angle is found by bisection.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        below = _probability(middle, freedom) < confidence
        low, high = (middle, high) if below else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(angle: float, freedom: float) -> float:
    values = np.cos(angle / 2 * (_NODES + 1)) ** (freedom - 1)
    integral = angle / 2 * float(_WEIGHTS @ values)
    log_constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return 2 * integral * math.exp(log_constant) / math.sqrt(math.pi)
