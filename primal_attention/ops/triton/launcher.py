"""Launch a Triton function again as it was compiled for the same kinds of arguments.

Triton looks at each argument of each launch to find what it has compiled for its kind: tens of
microseconds, as long as many a fused op runs. The arguments of a training step are of the same
kinds as those of the step before, which is seen much sooner.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_MOST = 4096  # kinds of arguments that are remembered


def launched(function: Any) -> Any:
    """A function that is launched from Python, as ``function[grid](*arguments, **options)``.

    In Triton's interpreter nothing is compiled; on AMD GPUs the sizes of tensors matter too.
    """
    compiles = isinstance(function, JITFunction) and torch.version.hip is None
    return Launcher(function) if compiles else function


class Launcher:
    """A Triton function, and what has been compiled of it."""

    def __init__(self, function: Any):
        self.function = function
        self.names = tuple(inspect.signature(function.fn).parameters)
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """What launches so many programs."""
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        device = driver.active.get_current_device()
        key = device, *_kinds(arguments), *options.items()
        compiled = self.compiled.get(key)
        if compiled is None:
            if len(self.compiled) == _MOST:
                self.compiled.clear()
            self.compiled[key] = self.function[grid](*arguments, **options)
            return
        named = [options[name] for name in self.names[len(arguments) :]]
        compiled[(*grid, 1, 1)[:3]](*arguments, *named)


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What decides for which compiled form they are: of tensors dtypes and alignment, else all."""
    return [
        (each.dtype, each.data_ptr() % 16 == 0)
        if isinstance(each, Tensor)
        else (each.base.dtype, *each.block_shape)
        if isinstance(each, TensorDescriptor)
        else each
        for each in arguments
    ]
