"""The KSVD objective J of one layer, and the trace term of its parameters."""

from primal_attention.ops.ksvd.composed import ksvd_objective
from primal_attention.ops.ksvd.reference import mean_over_sequences, objective_of_energies
from primal_attention.ops.ksvd.trace import trace

__all__ = ["ksvd_objective", "mean_over_sequences", "objective_of_energies", "trace"]
