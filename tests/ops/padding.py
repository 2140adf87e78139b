"""Masks and poisoned padding for the tests of fused ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def holes(batch: int, length: int, device: str) -> Tensor:
    """A mask with holes whose last sequence is all padding."""
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[-1] = False
    return mask.to(device)


def poisoned(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """NaN at the padded tokens."""
    if mask is None:
        return tensor
    return torch.where(mask[:, :, None, None], tensor, float("nan"))


def in_float64(*tensors: Tensor | None) -> list[Tensor | None]:
    """Copies with all digits."""
    return [None if x is None else x.detach().double() for x in tensors]


def assert_laid_out(actual: Sequence[Tensor], fake: Sequence[Tensor]) -> None:
    """Shapes, dtypes and strides are those that the compiler is told of."""
    for number, (one, other) in enumerate(zip(actual, fake, strict=True)):
        for what in ("shape", "dtype", "device"):
            assert getattr(one, what) == getattr(other, what), f"tensor {number}: {what}"
        assert one.stride() == other.stride(), f"tensor {number}: strides"
