"""The papers as executable text: float64, one head, no modules.

`ksvd` follows Chen et al. 2023 equation by equation, `weighted_ksvd` adds a learned time between
tokens to its kernel, `svr` follows Nguyen et al. 2023, `kernels` holds the kernels, and
`kernel_svd` decomposes the kernel matrix of two large sets of points.
"""

from primal_attention.theory import ksvd, svr, weighted_ksvd
from primal_attention.theory.kernel_svd import KernelSVD, NotFittedError
from primal_attention.theory.kernels import KERNELS, RBF, Cosine, Exponential, Kernel, Polynomial

__all__ = [
    "KERNELS",
    "RBF",
    "Cosine",
    "Exponential",
    "Kernel",
    "KernelSVD",
    "NotFittedError",
    "Polynomial",
    "ksvd",
    "svr",
    "weighted_ksvd",
]
