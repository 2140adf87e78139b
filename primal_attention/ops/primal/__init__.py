"""Scores, moments and Gram matrices of features."""

from primal_attention.ops.primal.collapsed import CollapsedResult, collapsed_attention
from primal_attention.ops.primal.eager import (
    Sides,
    both_sides,
    features,
    gram,
    moment,
    primal_scores,
    weights_given_x,
    with_features,
    zeroed,
)

__all__ = [
    "CollapsedResult",
    "Sides",
    "both_sides",
    "collapsed_attention",
    "features",
    "gram",
    "moment",
    "primal_scores",
    "weights_given_x",
    "with_features",
    "zeroed",
]
