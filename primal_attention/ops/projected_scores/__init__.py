"""All of a Primal layer between its tokens and their scores, as one op for a CPU."""

from primal_attention.ops.projected_scores.chunked import projected_scores
from primal_attention.ops.projected_scores.reference import ProjectedScores

__all__ = ["ProjectedScores", "projected_scores"]
