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
from primal_attention.ops.triton.launch import PRECISION, float32, padded


class RunningMeanOp(FusedOp):
    """Means over the real tokens up to each."""

    name = "running_mean"
    inputs = MeanInputs
    differentiable = ("z", "before")
    outputs = ("mean", "total")
    num_outputs = first_kept = 2

    def supports(self, given: MeanInputs) -> bool:
        """Return whether the walk supports this dtype and head dim."""
        return given.z.dtype in PRECISION and padded(given.z.shape[-1]) in fused_mean.CONFIGS

    def empty(self, given: MeanInputs) -> Sequence[Tensor]:
        """Allocate the means, and the sum after the last token."""
        z, (B, _, H, C) = given.z, given.z.shape
        return z.new_empty(z.shape), z.new_empty((B, H, C), dtype=torch.float32)

    def forward(self, given: MeanInputs, *, keep: bool) -> Sequence[Tensor]:
        """Return the means, and the sum after the last token."""
        return fused_mean.means(*given)

    def backward(self, given: MeanInputs, call: Backward) -> dict[str, Tensor]:
        """Gradients of the tokens and of the sum before them."""
        d_mean, d_total = call.grads
        d_mean = torch.zeros_like(given.z) if d_mean is None else d_mean
        dz, d_before = fused_mean.mean_gradients(d_mean, d_total, given.counts, given.token_mask)
        return {"z": dz, "before": d_before}

    def eager(self, given: MeanInputs) -> Sequence[Tensor]:
        """Compute the means and the sum in plain PyTorch."""
        return mean_eager(given)


class ScanOp(FusedOp):
    """Scan of sums: each token reads the sums over the tokens up to it, or over all."""

    name = "scan"
    inputs = ScanInputs
    differentiable = ("z", "values", "state", "steps")
    outputs = ("out", "after", *fused_scan.KEPT)
    num_outputs = first_kept = 2

    def supports(self, given: ScanInputs) -> bool:
        """Return whether the passes are made for these dtypes, sizes and maps."""
        names = {given.map_q, given.map_k}
        if not all(has_fused_form(name) or name == "unit_elu" for name in names):
            return False
        return fused_scan.is_scannable(given.z, given.values)

    def empty(self, given: ScanInputs) -> Sequence[Tensor]:
        """Allocate the reads of the tokens, the sums after the last one, and sums of the blocks."""
        (_, B, N, H, P), (sides, V) = given.z.shape, given.values.shape[2::2]
        out, after = float32(given.z, B, N, H, sides, V), float32(given.z, B, H, sides, P, V)
        return [out, after, *fused_scan.kept_sums(given)]

    def forward(self, given: ScanInputs, *, keep: bool) -> Sequence[Tensor]:
        """Return the reads of the tokens, the sums after the last one, and sums of the blocks."""
        return fused_scan.scan_forward(given)

    def backward(self, given: ScanInputs, call: Backward) -> dict[str, Tensor]:
        """Return the gradients of the tokens, their values, the state and the steps."""
        sums = [each if each.numel() else None for each in call.kept]
        return fused_scan.scan_backward(given, sums, *call.grads)

    def eager(self, given: ScanInputs) -> Sequence[Tensor]:
        """Return the outputs and the sums, in plain PyTorch."""
        return scan_eager(given)
