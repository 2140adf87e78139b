"""Scores, moments and Gram matrices of features."""

from primal_attention.ops.primal.eager import (
    Attended,
    Sides,
    both_sides,
    collapsed_attention,
    features,
    gram,
    moment,
    primal_scores,
    weights_given_x,
    with_features,
    zeroed,
)

__all__ = [
    "Attended",
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
