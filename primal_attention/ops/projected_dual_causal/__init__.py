"""All of a causal layer with dual weights between its tokens and its output projection."""

from primal_attention.ops.projected_dual_causal.composed import projected_dual_causal_attention

__all__ = ["projected_dual_causal_attention"]
