"""All of a Primal layer with dual weights between its tokens and its output projection, one op."""

from primal_attention.ops.projected_dual.composed import projected_dual_attention

__all__ = ["projected_dual_attention"]
