"""Fit patched layers to the attentions that they replaced."""

from primal_attention.patching.distill.distill import distill
from primal_attention.patching.distill.report import DistillReport

__all__ = ["DistillReport", "distill"]
