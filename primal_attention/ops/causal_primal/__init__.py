"""Primal-Attention over running means: the causal form with static weights, as one op."""

from primal_attention.ops.causal_primal.composed import causal_primal_attention
from primal_attention.ops.causal_primal.reference import CausalResult

__all__ = ["CausalResult", "causal_primal_attention"]
