"""Inputs of attention layers: checks, padding, and how projections read them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

_PLAIN_TENSORS = frozenset((Tensor, nn.Parameter))  # others have arithmetic of their own


def check_tokens(name: str, x: Tensor, dim: int) -> None:
    """Raise unless x is [B, N, dim] with at least one position."""
    if x.ndim != 3 or x.shape[-1] != dim:
        raise ValueError(f"{name} must have shape [batch, tokens, {dim}], got {list(x.shape)}")
    if x.shape[1] == 0:
        raise ValueError(f"{name} must have at least one token, got shape {list(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_mask(name: str, mask: Tensor | None, x: Tensor) -> None:
    """Raise unless mask is None or bool [B, N], True at the real tokens of x."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(
            f"{name} must be a bool tensor, True at real tokens, got {mask.dtype}; "
            f"convert a 0/1 mask with mask.bool()"
        )
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"{name} must have shape {list(x.shape[:2])} (batch, tokens), got {list(mask.shape)}"
        )


def check_inputs(
    dim: int,
    x: Tensor,
    context: Tensor | None,
    token_mask: Tensor | None,
    context_mask: Tensor | None,
    *,
    causal: bool = False,
) -> None:
    """Raise unless the arguments of a layer's forward pass fit the layer and each other."""
    check_tokens("x", x, dim)
    if token_mask is not None:
        check_mask("token_mask", token_mask, x)
    if context is None:
        if context_mask is not None:
            raise ValueError(f"context_mask {list(context_mask.shape)} was given without a context")
        return
    check_tokens("context", context, dim)
    check_mask("context_mask", context_mask, context)
    if context.shape[0] != x.shape[0]:
        raise ValueError(
            f"context must have the batch size {x.shape[0]} of x, got {context.shape[0]}"
        )
    if causal:
        raise ValueError("a context does not go with causal=True: it has no order relative to x")


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set padded positions of [B, N, ...] to zero, NaN included."""
    if mask is None:
        return x
    return torch.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0.0)


class Tokens(NamedTuple):
    """A batch of sequences whose padding has been zeroed."""

    x: Tensor  # [B, N, D]
    mask: Tensor | None  # [B, N], True at real tokens

    def num_real(self) -> Tensor:
        """Count the real tokens of each sequence, [B], in the accumulation dtype."""
        x, dtype = self.x, torch.promote_types(self.x.dtype, torch.float32)
        if self.mask is None:
            return torch.full(x.shape[:1], x.shape[1], dtype=dtype, device=x.device)
        return self.mask.sum(1, dtype=dtype)


def real_tokens(x: Tensor, mask: Tensor | None) -> Tokens:
    """Zero the padding; the mask is made contiguous, as ``torch.where`` may copy its layout."""
    mask = None if mask is None else mask.contiguous()
    return Tokens(zero_padding(x, mask), mask)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether calling the module is a product with its weight and nothing else.

    Adapters, quantisation and parametrisation change its class or weight, offloading ``forward``.
    """
    if type(module) is not nn.Linear or type(module.weight) not in _PLAIN_TENSORS:
        return False
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
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
