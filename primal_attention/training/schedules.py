"""Learning rates as functions of the step, so that a resumed run needs to know the step alone."""

import math
from collections.abc import Callable


def _constant(progress: float, warmup: float) -> float:
    return 1.0


def _warmup(progress: float, warmup: float) -> float:
    return _rise(progress, warmup)


def _one_cycle(progress: float, warmup: float) -> float:
    """Rise linearly to the peak and fall linearly to zero."""
    return min(_rise(progress, warmup), (1 - progress) / (1 - warmup) if warmup < 1 else 1.0)


def _cosine(progress: float, warmup: float) -> float:
    """Rise linearly to the peak and fall by half a cosine to zero."""
    if progress < warmup:
        return _rise(progress, warmup)
    return (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, 1e-12))) / 2


def _inverse_sqrt(progress: float, warmup: float) -> float:
    """Rise linearly to the peak, then fall with one over the root of the step.

    Without a warm-up there is no step to count from: it stays at the peak.
    """
    falling = warmup > 0 and progress > warmup
    return math.sqrt(warmup / progress) if falling else _rise(progress, warmup)


def _rise(progress: float, warmup: float) -> float:
    return min(1.0, progress / warmup) if warmup > 0 else 1.0


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "constant": _constant,
    "warmup": _warmup,
    "one_cycle": _one_cycle,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
}


def lr_factor(schedule: str, step: int, total_steps: int, warmup: float) -> float:
    """Return the factor of the learning rate at a step, 0 to ``total_steps`` - 1.

    Steps are taken at their middle, so that neither end of a cycle is a step of length zero.
    """
    return SCHEDULES[schedule]((step + 0.5) / total_steps, warmup)
