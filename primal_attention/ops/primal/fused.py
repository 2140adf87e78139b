"""Fused ops of features: outputs with Gram matrices, and moments.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from primal_attention.feature_maps import has_fused_form
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.primal import fused_attend
from primal_attention.ops.primal.collapsed import CollapsedInputs, collapsed_eager
from primal_attention.ops.primal.eager import MomentInputs, moment_eager
from primal_attention.ops.primal.fused_attend import Attended, InputGradients, OutputGradients
from primal_attention.ops.primal.fused_moment import Rows, add_moments, pull_back_moment
from primal_attention.ops.triton.launch import DOTS, padded


class PrimalOp(FusedOp):
    """Outputs and Gram matrices, from matrices A_e and A_r."""

    name = "primal"
    inputs = CollapsedInputs
    differentiable = ("q", "k", "a_e", "a_r", "bias")
    outputs = ("out", "gram_q", "gram_k")
    num_outputs = first_kept = 3

    def supports(self, given: CollapsedInputs) -> bool:
        """Whether the passes are made for these dtypes, sizes and maps."""
        q, k = given.q, given.k
        maps = has_fused_form(given.map_q) and has_fused_form(given.map_k)
        same = q.dtype == k.dtype and q.shape == k.shape
        return maps and same and q.dtype in DOTS and Attended(*given).width <= 256

    def forward(self, given: CollapsedInputs, *, keep: bool) -> Sequence[Tensor]:
        """Outputs and both Gram matrices."""
        return fused_attend.attend(Attended(*given), gram_q=True, gram_k=True)

    def empty(self, given: CollapsedInputs) -> Sequence[Tensor]:
        """The same, unwritten."""
        q, (B, N, H, P) = given.q, given.q.shape
        grams = (q.new_empty((B, H, P, P), dtype=torch.float32) for _ in range(2))
        return q.new_empty((B, N, H, given.a_e.shape[-1])), *grams

    def backward(self, given: CollapsedInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tensors."""
        into = InputGradients(*(None if x is None else torch.empty_like(x) for x in given[:5]))
        fused_attend.write_gradients(Attended(*given), OutputGradients(*call.grads), into)
        return {name: d for name, d in into._asdict().items() if d is not None}

    def eager(self, given: CollapsedInputs) -> Sequence[Tensor]:
        """The outputs, in plain PyTorch."""
        return collapsed_eager(given)


class MomentOp(FusedOp):
    """Sums of phi h^T over the real tokens."""

    name = "moment"
    inputs = MomentInputs
    differentiable = ("z", "values")
    outputs = ("moment",)

    def supports(self, given: MomentInputs) -> bool:
        """Whether the passes are made for these dtypes, sizes and this map."""
        z, values = given.z, given.values
        sizes = padded(z.shape[-1]) <= 256 and 0 < values.shape[-1] <= 256
        same = z.dtype == values.dtype and z.dtype in DOTS
        return same and sizes and has_fused_form(given.feature_map)

    def forward(self, given: MomentInputs, *, keep: bool) -> Sequence[Tensor]:
        """The moment [B, H, P, S]."""
        [moment] = self.empty(given)
        add_moments(_rows(given), given.values, moment)
        return (moment,)

    def empty(self, given: MomentInputs) -> Sequence[Tensor]:
        """The same, unwritten."""
        (B, _, H, P), S = given.z.shape, given.values.shape[-1]
        return (given.z.new_empty((B, H, P, S), dtype=torch.float32),)

    def backward(self, given: MomentInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tokens and of their values."""
        dz, d_values = torch.empty_like(given.z), torch.empty_like(given.values)
        [d_moment] = call.grads
        pull_back_moment(_rows(given), given.values, d_moment, None, dz, d_values)
        return {"z": dz, "values": d_values}

    def eager(self, given: MomentInputs) -> Sequence[Tensor]:
        """The moment, in plain PyTorch."""
        return (moment_eager(given),)


def _rows(given: MomentInputs) -> Rows:
    return Rows(given.z, given.token_mask, given.feature_map)
