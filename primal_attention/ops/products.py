"""The large products of the projections.

On a CPU in float32 oneDNN multiplies large matrices faster than the BLAS that PyTorch calls for
them, 1.1 times on one core and up to 1.5 times on two. What it generates for each new shape takes
milliseconds, so that small products are left to the BLAS.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 1 << 28  # multiplications


def affine(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same as ``torch.nn.functional.linear`` of x [..., D], weight [R, D] and bias [R].

    It has no derivative: it is for the inside of ops that have their own.
    """
    if is_large_on_cpu(x, weight):
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return y
    return F.linear(x, weight, bias)


def is_large_on_cpu(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of x [..., D] and weight [R, D] is one for oneDNN."""
    plain = x.is_cpu and x.dtype == weight.dtype == torch.float32
    has_onednn = torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()
    return plain and x.numel() * weight.shape[0] >= _LARGE and has_onednn
