"""The KSVD objectives of one pass of one layer."""

from primal_attention.ops.objective.eager import mean_j, mean_over_sequences, unexplained_energy

__all__ = ["mean_j", "mean_over_sequences", "unexplained_energy"]
