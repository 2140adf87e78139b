"""Two projections of the same tokens as one product of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def packed_projection(x: Tensor, first: nn.Module, second: nn.Module) -> Tensor | None:
    """[first(x), second(x)] side by side, [B, N, 2 D], or None where the modules must be called.

    They are called where either is no plain ``nn.Linear``, as after quantisation or with adapters,
    or has hooks. Without gradients there is nothing to gain: it is the backward pass that becomes
    shorter.
    """
    if not torch.is_grad_enabled() or not _alike(first, second):
        return None
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    weight = torch.cat((first.weight, second.weight))
    bias = None if first.bias is None else torch.cat((first.bias, second.bias))
    return F.linear(x, weight, bias)


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether both are plain, with weights of one kind."""
    return (
        _is_plain(first)
        and _is_plain(second)
        and first.weight.dtype == second.weight.dtype
        and first.weight.device == second.weight.device
        and (first.bias is None) == (second.bias is None)
    )


def _is_plain(module: nn.Module) -> bool:
    """Whether it is nn.Linear itself, and calling it does nothing else."""
    hooked = any(getattr(module, name) for name in _HOOKS)
    return type(module) is nn.Linear and "forward" not in vars(module) and not hooked
