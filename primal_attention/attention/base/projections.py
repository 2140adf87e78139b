"""Projections that are plain affine maps, which an op may compute in place of the module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from primal_attention.ops.linear import linear
from primal_attention.ops.op import may_run_fused
from primal_attention.precision import autocast_dtype

_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))  # others have arithmetic of their own


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether calling the module is a product with its weight and nothing else.

    Adapters, quantisation and parametrisation make another class of it, or its weight of another
    kind; offloading replaces its ``forward``.
    """
    plain = type(module) is nn.Linear and has_plain_call(module)
    return plain and type(module.weight) in _PLAIN_TENSORS


def has_plain_call(module: nn.Module) -> bool:
    """Return whether a call of the module is its class's forward pass and nothing else."""
    return (
        not (
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        )
        and "forward" not in module.__dict__
        and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def outputs_of(projection: nn.Module) -> Tensor:
    """An empty tensor of the dtype of a projection, on the device where it runs."""
    weight: Any = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor):  # a method after quantisation, none in a module of its own
        tensors = (*projection.parameters(), *projection.buffers())
        weight = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    hook = getattr(projection, "_hf_hook", None)  # accelerate, whose weights may be elsewhere
    device = getattr(hook, "execution_device", None)
    return torch.empty(0, dtype=dtype, device=weight.device if device is None else device)


class Packed(NamedTuple):
    """Projections one below the other."""

    weight: Tensor  # [R, D]
    bias: Tensor | None  # [R]


def packed(x: Tensor, projections: Sequence[nn.Module]) -> Packed | None:
    """Weights and biases in the dtype of x; None where modules must be called."""
    plain = [each for each in projections if is_plain(each)]
    biases: list[Tensor] = [each.bias for each in plain if each.bias is not None]
    kinds = {(each.weight.dtype, each.weight.device) for each in plain}
    if len(plain) < len(projections) or len(biases) not in (0, len(plain)) or len(kinds) > 1:
        return None
    bias = torch.cat(biases).to(x.dtype) if biases else None
    weights: list[Tensor] = [each.weight for each in plain]
    return Packed(torch.cat(weights).to(x.dtype), bias)


def projected(x: Tensor, projection: nn.Module) -> Tensor:
    """The projection of x; of many tokens on a GPU by an op whose bias gradient is quicker."""
    if torch.is_grad_enabled() and may_run_fused("linear", x):
        given = packed(x.to(autocast_dtype(x)), [projection])
        if given is not None and given.bias is not None:
            return linear(x.to(given.weight.dtype), given.weight, given.bias)
    y: Tensor = projection(x)
    return y
