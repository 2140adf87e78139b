"""Projections that are plain affine maps, which an op may compute in place of the module."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))  # others have arithmetic of their own


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether calling the module is a product with its weight and nothing else.

    Adapters, quantisation and parametrisation change its class or weight, offloading ``forward``.
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
    """Return an empty tensor of the dtype of a projection, on the device where it runs."""
    weight: Any = getattr(projection, "weight", None)
    if not isinstance(weight, Tensor):  # a method after quantisation, none in a module of its own
        tensors = (*projection.parameters(), *projection.buffers())
        weight = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
    dtype = weight.dtype if weight.is_floating_point() else torch.get_default_dtype()
    hook = getattr(projection, "_hf_hook", None)  # accelerate, whose weights may be elsewhere
    device = getattr(hook, "execution_device", None)
    return torch.empty(0, dtype=dtype, device=weight.device if device is None else device)


def is_cast_alike(x: Tensor, projections: Sequence[nn.Module]) -> bool:
    """Return whether the projections meet tokens of this dtype, by themselves or by autocast."""
    if torch.is_autocast_enabled(x.device.type):
        return True
    return all(each.weight.dtype == x.dtype for each in projections)
