"""The papers as executable text: float64, one head, no modules.

`ksvd` follows Chen et al. 2023 equation by equation, `kernels` holds the kernels, and
`kernel_svd` decomposes the kernel matrix of two large sets of points.
"""

from primal_attention.theory.kernel_svd import KernelSVD, NotFittedError
from primal_attention.theory.kernels import KERNELS, RBF, Cosine, Exponential, Kernel, Polynomial
from primal_attention.theory.ksvd import (
    DualSolution,
    KKTResiduals,
    KSVDPoint,
    Scores,
    Weights,
    best_unexplained_energy,
    dual_from_scores,
    dual_scores,
    induced_kernel_matrix,
    kkt_residuals,
    ksvd_objective,
    lagrangian,
    objective_at_solution,
    objective_from_dual,
    primal_scores,
    shifted_eigenvalue_matrix,
    solve_dual,
    stationary_point,
    svd_of_scores,
    unexplained_energy,
    weights_from_dual,
    weights_given_x,
)

__all__ = [
    "KERNELS",
    "RBF",
    "Cosine",
    "DualSolution",
    "Exponential",
    "KKTResiduals",
    "KSVDPoint",
    "Kernel",
    "KernelSVD",
    "NotFittedError",
    "Polynomial",
    "Scores",
    "Weights",
    "best_unexplained_energy",
    "dual_from_scores",
    "dual_scores",
    "induced_kernel_matrix",
    "kkt_residuals",
    "ksvd_objective",
    "lagrangian",
    "objective_at_solution",
    "objective_from_dual",
    "primal_scores",
    "shifted_eigenvalue_matrix",
    "solve_dual",
    "stationary_point",
    "svd_of_scores",
    "unexplained_energy",
    "weights_from_dual",
    "weights_given_x",
]
