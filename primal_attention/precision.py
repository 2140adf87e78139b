"""The precision contract: whatever the input's dtype, sums are accumulated in at least float32.

Autocast would lower the precision of the small matrices on which the objectives rest, so the
arithmetic that this package writes out itself runs with autocast off; the projections, which are
ordinary ``nn.Linear`` layers, follow it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the half precisions, the dtype itself for float32 and float64."""
    return torch.promote_types(dtype, torch.float32)


def accumulate(tensor: Tensor) -> Tensor:
    """The tensor in its accumulation dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def operand_dtype(of_tokens: torch.dtype, of_matrix: torch.dtype) -> torch.dtype:
    """The dtype in which a matrix is kept that meets tokens in products alone.

    Products of bfloat16 round it to bfloat16 anyway, which has the range of float32.
    """
    return torch.bfloat16 if of_tokens == torch.bfloat16 else of_matrix


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast projects x; that of x without it, or on the meta device."""
    kind = x.device.type
    if kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which operations keep the dtype of their operands."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast; its first argument is a tensor and names the device."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        assert isinstance(first, Tensor)
        with without_autocast(first.device):
            return function(*args, **kwargs)

    return run
