"""Primal-Attention of one layer: outputs and Gram matrices from queries, keys and weights."""

from primal_attention.ops.primal.chunked import (
    collapse,
    collapsed_attention,
    gram,
    primal_attention,
)
from primal_attention.ops.primal.packed import packed_attention
from primal_attention.ops.primal.reference import PrimalResult

__all__ = [
    "PrimalResult",
    "collapse",
    "collapsed_attention",
    "gram",
    "packed_attention",
    "primal_attention",
]
