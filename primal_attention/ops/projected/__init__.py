"""All of a Primal layer between its tokens and its output projection, as one op."""

from primal_attention.ops.projected.composed import projected_attention
from primal_attention.ops.projected.reference import ProjectedResult

__all__ = ["ProjectedResult", "projected_attention"]
