"""The e- and r-scores of one layer, and the sums of their squares."""

from primal_attention.ops.scores.chunked import primal_scores
from primal_attention.ops.scores.reference import ScoresResult

__all__ = ["ScoresResult", "primal_scores"]
