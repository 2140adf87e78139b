"""The KSVD objectives of one pass of one layer."""

from primal_attention.ops.objective.eager import (
    MeanJInputs,
    mean_j,
    mean_over_sequences,
    unexplained_energy,
)

__all__ = ["MeanJInputs", "mean_j", "mean_over_sequences", "unexplained_energy"]
