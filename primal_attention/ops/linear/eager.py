r"""y = x W^T + b, by the fused form where that is sooner.

Letters: D columns of x, E columns of y.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.op import fused


class LinearInputs(NamedTuple):
    """All that the op is given."""

    x: Tensor  # [..., D]
    weight: Tensor  # [E, D]
    bias: Tensor  # [E]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same as ``torch.nn.functional.linear``, autocast included."""
    if bias is not None and not _is_cast(x):
        found = fused("linear", LinearInputs(x, weight, bias))
        if found is not None:
            return found[0]
    return F.linear(x, weight, bias)


def _is_cast(x: Tensor) -> bool:
    """Whether autocast changes the dtype of x."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and x.dtype != torch.get_autocast_dtype(kind)
