"""Check the inputs of attention layers, and zero their padding."""

from typing import NamedTuple

import torch
from torch import Tensor


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
