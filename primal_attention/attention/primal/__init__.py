"""Primal-Attention: the layer, its decode state and its statistics."""

from primal_attention.attention.primal.fold import FoldedPrimalAttention
from primal_attention.attention.primal.kernel import FeaturesAndWeights, PrimalState
from primal_attention.attention.primal.layer import PrimalAttention
from primal_attention.attention.primal.statistics import KSVDLayer, KSVDStatistics
from primal_attention.attention.primal.time_weighted import PrimalTimeAttention

__all__ = [
    "FeaturesAndWeights",
    "FoldedPrimalAttention",
    "KSVDLayer",
    "KSVDStatistics",
    "PrimalAttention",
    "PrimalState",
    "PrimalTimeAttention",
]
