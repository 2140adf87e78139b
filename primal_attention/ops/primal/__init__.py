"""Scores, moments and Gram matrices of features."""

from primal_attention.ops.primal.collapsed import CollapsedResult, collapsed_attention
from primal_attention.ops.primal.eager import (
    both_sides,
    features,
    gram,
    moment,
    primal_scores,
    zeroed,
)

__all__ = [
    "CollapsedResult",
    "both_sides",
    "collapsed_attention",
    "features",
    "gram",
    "moment",
    "primal_scores",
    "zeroed",
]
