"""The precision contract: whatever the input's dtype, sums are accumulated in at least float32.

Autocast would lower the precision of the small matrices on which the objectives rest, so the
arithmetic that this package writes out itself runs with autocast off; the projections, which are
ordinary ``nn.Linear`` layers, follow it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions, the dtype itself for float32 and float64."""
    return torch.promote_types(dtype, torch.float32)


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in its accumulation dtype."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which operations keep the dtype of their operands."""
    return torch.autocast(device.type, enabled=False)


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast; its first argument is a tensor and names the device."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        with without_autocast(first.device):
            return function(*args, **kwargs)

    return run
