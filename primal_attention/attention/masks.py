"""What every attention layer asks of its inputs, and what it does with padding first."""

from __future__ import annotations

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


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """The tokens [B, N, D] with zeros at the padded positions, whatever stood there."""
    return x if mask is None else torch.where(mask[:, :, None], x, 0.0)


def num_tokens(x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """How many real tokens each sequence has, [B]."""
    if mask is None:
        return torch.full((x.shape[0],), x.shape[1], dtype=dtype, device=x.device)
    return mask.sum(1).to(dtype)
