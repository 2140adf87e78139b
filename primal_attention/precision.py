"""The precision contract: sums are accumulated in at least float32, whatever the input's dtype.

Autocast would lower the precision of the small matrices on which the objectives rest, so only the
projections, which are ordinary ``nn.Linear`` layers, follow it; the other arithmetic of this
package runs with autocast off.
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
    """Return float32 for the half precisions, else the dtype itself."""
    return torch.promote_types(dtype, torch.float32)


def accumulate(tensor: Tensor) -> Tensor:
    """Cast a tensor to its accumulation dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def operand_dtype(of_tokens: torch.dtype, of_matrix: torch.dtype) -> torch.dtype:
    """Return the dtype of a matrix that is only multiplied with tokens.

    Products of bfloat16 round it to bfloat16 anyway, which has the range of float32.
    """
    return torch.bfloat16 if of_tokens == torch.bfloat16 else of_matrix


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which autocast projects x; without autocast, or on meta, that of x."""
    kind = x.device.type
    if kind != "meta" and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations keep the dtype of their operands."""
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
