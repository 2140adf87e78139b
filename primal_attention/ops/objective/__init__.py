"""The KSVD objectives of one pass of one layer."""

from primal_attention.ops.objective.eager import mean_j, mean_over_sequences, unexplained_energy
from primal_attention.ops.objective.fused import fused_mean_j

__all__ = ["fused_mean_j", "mean_j", "mean_over_sequences", "unexplained_energy"]
