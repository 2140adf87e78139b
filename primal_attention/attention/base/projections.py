"""Projections that are plain affine maps, which an op may compute in place of the module."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import nn


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether calling the module is a product with its weight and nothing else.

    An adapter, a quantised or parametrized layer is another class; hooks and a replaced
    ``forward``, by which weights are offloaded, must run.
    """
    return type(module) is nn.Linear and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or nn.modules.module._has_any_global_hook()
    )


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which autocast projects x; that of x without it."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
