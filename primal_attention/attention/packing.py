"""Projections that are plain affine maps: two as one product of matrices, or one by its own op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.ops.column_sum import linear

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PackedProjection(NamedTuple):
    """The parameters of both, in the dtype in which the tokens are projected."""

    weight: Tensor  # [2 D, D]
    bias: Tensor | None  # [2 D]


def packed_projection(x: Tensor, first: nn.Module, second: nn.Module) -> PackedProjection | None:
    """The projections of x one below the other, or None where the modules must be called.

    They are called where either is no plain ``nn.Linear``, as after quantisation or with adapters,
    or has hooks. Without gradients there is nothing to gain: it is the backward pass that becomes
    shorter.
    """
    if not torch.is_grad_enabled() or not _alike(first, second):
        return None
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    dtype = projected_dtype(x, first.weight)
    if dtype is None:
        return None
    weight = torch.cat((first.weight, second.weight)).to(dtype)
    bias = None if first.bias is None else torch.cat((first.bias, second.bias)).to(dtype)
    return PackedProjection(weight, bias)


def projected(x: Tensor, projection: nn.Module) -> Tensor:
    """The projection of x; with gradients on a GPU, by the op that is quick to sum its bias's."""
    if x.is_cuda and torch.is_grad_enabled() and is_plain(projection):
        assert isinstance(projection, nn.Linear)
        dtype = projected_dtype(x, projection.weight)
        if dtype is not None and projection.bias is not None:
            return linear(x.to(dtype), projection.weight.to(dtype), projection.bias.to(dtype))
    y: Tensor = projection(x)
    return y


def projected_dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype of a product of the two, as autocast has it; None where it would be refused."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return weight.dtype if x.dtype == weight.dtype else None


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether both are plain, with weights of one kind."""
    return (
        is_plain(first)
        and is_plain(second)
        and first.weight.dtype == second.weight.dtype
        and first.weight.device == second.weight.device
        and (first.bias is None) == (second.bias is None)
    )


def is_plain(module: nn.Module) -> bool:
    """Whether it is nn.Linear itself, and calling it does nothing else."""
    hooked = any(getattr(module, name) for name in _HOOKS)
    return type(module) is nn.Linear and "forward" not in vars(module) and not hooked
