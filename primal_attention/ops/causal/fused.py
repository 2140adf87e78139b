"""Fused ops of causal sums: running means, and scans.

Letters: B batch, N tokens, H heads, C head dim, P features, V value dim.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from primal_attention.feature_maps import has_fused_form
from primal_attention.ops.causal import fused_mean, fused_scan
from primal_attention.ops.causal.eager import MeanInputs, ScanInputs, mean_eager, scan_eager
from primal_attention.ops.op import Backward, FusedOp
from primal_attention.ops.triton.launch import PRECISION, padded


class RunningMeanOp(FusedOp):
    """Means over the real tokens up to each."""

    name = "running_mean"
    inputs = MeanInputs
    differentiable = ("z", "before")
    outputs = ("mean", "total")
    num_outputs = first_kept = 2

    def supports(self, given: MeanInputs) -> bool:
        """Whether the walk is made for this dtype and head dim."""
        return given.z.dtype in PRECISION and padded(given.z.shape[-1]) in fused_mean.CONFIGS

    def empty(self, given: MeanInputs) -> Sequence[Tensor]:
        """The means, and the sum after the last token."""
        z, (B, _, H, C) = given.z, given.z.shape
        return z.new_empty(z.shape), z.new_empty((B, H, C), dtype=torch.float32)

    def forward(self, given: MeanInputs, *, keep: bool) -> Sequence[Tensor]:
        """The same, written."""
        return fused_mean.means(*given)

    def backward(self, given: MeanInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tokens and of the sum before them."""
        d_mean, d_total = call.grads
        d_mean = torch.zeros_like(given.z) if d_mean is None else d_mean
        dz, d_before = fused_mean.mean_gradients(d_mean, d_total, given.counts, given.token_mask)
        return {"z": dz, "before": d_before}

    def eager(self, given: MeanInputs) -> Sequence[Tensor]:
        """The means and the sum, in plain PyTorch."""
        return mean_eager(given)


class ScanOp(FusedOp):
    """What each token reads of the sum over those up to it."""

    name = "scan"
    inputs = ScanInputs
    differentiable = ("q", "k", "values", "state")
    outputs = ("out", "after")
    num_outputs = first_kept = 2

    def supports(self, given: ScanInputs) -> bool:
        """Whether the walks are made for these dtypes, sizes and maps."""
        maps = has_fused_form(given.map_q) and has_fused_form(given.map_k)
        return maps and fused_scan.is_scannable(*given[:3])

    def empty(self, given: ScanInputs) -> Sequence[Tensor]:
        """What each token reads, and the state after the last one."""
        (B, N, H, P), V = given.q.shape, given.values.shape[-1]
        shapes = (B, N, H, V), (B, H, P, V)
        return [given.q.new_empty(shape, dtype=torch.float32) for shape in shapes]

    def forward(self, given: ScanInputs, *, keep: bool) -> Sequence[Tensor]:
        """The same, written."""
        return fused_scan.scan_forward(given)

    def backward(self, given: ScanInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tokens, their values and the state before them."""
        cotangents = zip(call.grads, self.empty(given), strict=True)
        d_out, d_state = (like.zero_() if d is None else d for d, like in cotangents)
        computed = fused_scan.scan_backward(given, d_out, d_state)
        return dict(zip(self.differentiable, computed, strict=True))

    def eager(self, given: ScanInputs) -> Sequence[Tensor]:
        """The outputs and the state, in plain PyTorch."""
        return scan_eager(given)
