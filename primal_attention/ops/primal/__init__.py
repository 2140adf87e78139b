"""Primal-Attention of one layer: outputs and Gram matrices from queries, keys and weights."""

from primal_attention.ops.primal.chunked import collapsed_attention, gram, primal_attention
from primal_attention.ops.primal.reference import PrimalResult

__all__ = [
    "PrimalResult",
    "collapsed_attention",
    "gram",
    "primal_attention",
]
