"""Projections that are plain affine maps, which an op may compute in place of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from primal_attention.ops.layer import takes as is_large
from primal_attention.ops.linear import linear


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


class Packed(NamedTuple):
    """Projections one below the other."""

    weight: Tensor  # [R, D]
    bias: Tensor | None  # [R]


def packed(x: Tensor, projections: Sequence[nn.Module]) -> Packed | None:
    """Weights and biases in the dtype of x; None where modules must be called."""
    plain = [each for each in projections if is_plain(each)]
    biases = [each.bias for each in plain if each.bias is not None]
    kinds = {(each.weight.dtype, each.weight.device) for each in plain}
    if len(plain) < len(projections) or len(biases) not in (0, len(plain)) or len(kinds) > 1:
        return None
    bias = torch.cat(biases).to(x.dtype) if biases else None
    return Packed(torch.cat([each.weight for each in plain]).to(x.dtype), bias)


def projected(x: Tensor, projection: nn.Module) -> Tensor:
    """The projection of x; of many tokens on a GPU by an op whose bias gradient is quicker."""
    if torch.is_grad_enabled() and is_large(x):
        given = packed(x.to(autocast_dtype(x)), [projection])
        if given is not None and given.bias is not None:
            return linear(x.to(given.weight.dtype), given.weight, given.bias)
    y: Tensor = projection(x)
    return y


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast projects x; that of x without it."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
