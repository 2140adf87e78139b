r"""y = x W^T + b with its backward pass: $dx = dy\,W$, $dW = dy^\top x$, $db = \sum dy$.

The products are the library's. Letters: D columns of x, E columns of y.
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.linear.eager import LinearInputs
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.triton.launch import DOTS
from primal_attention.ops.triton.sums import column_sum


class LinearOp(FusedOp):
    """The op with a fused sum of columns."""

    name = "linear"
    inputs = LinearInputs
    differentiable = ("x", "weight", "bias")
    outputs = ("y",)

    def supports(self, given: LinearInputs) -> bool:
        """Whether all are of one dtype that the sum takes."""
        x, weight, bias = given
        return x.dtype in DOTS and x.dtype == weight.dtype == bias.dtype

    def forward(self, given: LinearInputs, *, keep: bool) -> Sequence[Tensor]:
        """Y [..., E]."""
        return (F.linear(*given),)

    def empty(self, given: LinearInputs) -> Sequence[Tensor]:
        """The same, unwritten."""
        x, weight, _ = given
        return (x.new_empty((*x.shape[:-1], weight.shape[0])),)

    def backward(self, given: LinearInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of x, weight and bias."""
        [d_y] = call.grads
        if d_y is None:
            return {
                name: tensor.new_zeros(tensor.shape) for name, tensor in given._asdict().items()
            }
        return affine_gradients(given.x, given.weight, d_y, call.wanted)

    def eager(self, given: LinearInputs) -> Sequence[Tensor]:
        """Y, in plain PyTorch."""
        return (F.linear(*given),)


def affine_gradients(
    x: Tensor, weight: Tensor, d_y: Tensor, wanted: frozenset[str], **known: Any
) -> dict[str, Tensor]:
    """The wanted gradients of x, weight and bias; those that are known are not computed."""
    rows, found = d_y.reshape(-1, d_y.shape[-1]), dict(known)
    if "x" in wanted:
        found["x"] = F.linear(rows, weight.mT).view(x.shape)
    if "weight" in wanted:
        found["weight"] = rows.mT @ x.reshape(-1, x.shape[-1])
    if "bias" in wanted and "bias" not in found:
        found["bias"] = column_sum(rows)
    return found
