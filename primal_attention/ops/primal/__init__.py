"""Scores, moments and Gram matrices of features."""

from primal_attention.ops.primal.eager import (
    both_sides,
    features,
    gram,
    moment,
    primal_scores,
    zeroed,
)

__all__ = ["both_sides", "features", "gram", "moment", "primal_scores", "zeroed"]
