"""Causal Primal-Attention with dual weights: both sides of the kernel in one op."""

from primal_attention.ops.dual_causal.chunked import dual_causal_attention
from primal_attention.ops.dual_causal.reference import DualCausalResult

__all__ = ["DualCausalResult", "dual_causal_attention"]
