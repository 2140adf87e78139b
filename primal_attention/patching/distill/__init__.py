"""Fit patched layers to the attentions that they replaced."""

from primal_attention.patching.distill.distill import DistillReport, distill

__all__ = ["DistillReport", "distill"]
