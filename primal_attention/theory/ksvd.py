r"""The kernel singular value decomposition of Chen et al. 2023, equation by equation.

"Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal Representation",
NeurIPS 2023. One head, float64, plain functions of tensors. Equation numbers are the paper's.

The data are the features $\Phi_q$, $\Phi_k$ of queries and keys and the constant matrix
$F_X = f(X)$ of the data-dependent weights; `f_x=None` is $F_X = I$, data-independent weights.
Deviation: the paper has as many keys as queries; here the two numbers may differ.

Legend: N queries, T keys, P feature dim, M rows of F_X (P where F_X = I), S directions.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Scores(NamedTuple):
    """Projections of the queries and of the keys on the directions."""

    e: Tensor  # [N, S]
    r: Tensor  # [T, S]


class Weights(NamedTuple):
    """Projection weights of the primal problem, w_e and w_r or the same given X."""

    e: Tensor  # [M, S], given X [P, S]
    r: Tensor  # [M, S], given X [P, S]


class DualSolution(NamedTuple):
    """Leading singular triplets of a kernel matrix: the solution of eq. (7)."""

    h_e: Tensor  # [N, S], left singular vectors
    h_r: Tensor  # [T, S], right singular vectors
    singular_values: Tensor  # [S], positive and decreasing

    @property
    def lambda_diag(self) -> Tensor:
        r"""$\Lambda = \Sigma^{-1}$ (Theorem 3.2)."""
        return 1 / self.singular_values


class KSVDPoint(NamedTuple):
    """A value of every variable of the Lagrangian (13), and of Lambda."""

    w_e: Tensor  # [M, S]
    w_r: Tensor  # [M, S]
    e_scores: Tensor  # [N, S]
    r_scores: Tensor  # [T, S]
    h_e: Tensor  # [N, S]
    h_r: Tensor  # [T, S]
    lambda_diag: Tensor  # [S]


class KKTResiduals(NamedTuple):
    """Relative errors of the six conditions of eq. (14), in the order of the equation."""

    w_r: float
    w_e: float
    h_e: float
    h_r: float
    e_scores: float
    r_scores: float

    @property
    def max(self) -> float:
        """The largest of the six."""
        return max(self)


def induced_kernel_matrix(phi_q: Tensor, phi_k: Tensor, f_x: Tensor | None = None) -> Tensor:
    r"""Compute $K_{ij} = \langle F_X\phi_q(x_i), F_X\phi_k(x_j)\rangle$ (Theorem 3.2): [N, T]."""
    _check_features(phi_q, phi_k, f_x)
    return _transformed(phi_q, f_x) @ _transformed(phi_k, f_x).T


def weights_given_x(w_e: Tensor, w_r: Tensor, f_x: Tensor | None = None) -> Weights:
    r"""Compute $W_{e|X} = F_X^\top W_e$ and $W_{r|X} = F_X^\top W_r$, below eq. (6): [P, S]."""
    return Weights(w_e, w_r) if f_x is None else Weights(f_x.T @ w_e, f_x.T @ w_r)


def primal_scores(phi_q: Tensor, phi_k: Tensor, w_e_given_x: Tensor, w_r_given_x: Tensor) -> Scores:
    r"""Compute $e(x) = W_{e|X}^\top\phi_q(x)$, $r(x) = W_{r|X}^\top\phi_k(x)$: eq. (9) and (16)."""
    return Scores(phi_q @ w_e_given_x, phi_k @ w_r_given_x)


def dual_scores(
    kernel_of_queries: Tensor, kernel_of_keys: Tensor, h_e: Tensor, h_r: Tensor
) -> Scores:
    r"""Sum $e(x) = \sum_j h_{r_j}\kappa(x, x_j)$, $r(x) = \sum_i h_{e_i}\kappa(x_i, x)$: (8), (17).

    Args:
        kernel_of_queries: Any queries x against the T keys of the solution, [any, T].
        kernel_of_keys: The N queries of the solution against any keys x, [N, any].
        h_e: Dual variables of the queries, [N, S].
        h_r: Dual variables of the keys, [T, S].

    Returns:
        The scores of those queries and keys. Where both matrices are the kernel matrix of the
        solution, the scores of its own points.
    """
    return Scores(kernel_of_queries @ h_r, kernel_of_keys.T @ h_e)


def shifted_eigenvalue_matrix(kernel_matrix: Tensor) -> Tensor:
    r"""Return the symmetric $[[0, K], [K^\top, 0]]$ of eq. (7) and (15): [N + T, N + T].

    Its eigenvectors $[H_e; H_r]$ have the eigenvalues $\Sigma = \Lambda^{-1}$; every singular
    value of K appears twice, with both signs, beside |N - T| zeros.
    """
    N, T = kernel_matrix.shape
    zeros = kernel_matrix.new_zeros
    top = torch.cat([zeros(N, N), kernel_matrix], dim=1)
    bottom = torch.cat([kernel_matrix.T, zeros(T, T)], dim=1)
    return torch.cat([top, bottom])


def solve_dual(kernel_matrix: Tensor, num_directions: int) -> DualSolution:
    r"""Solve $K H_r = H_e\Sigma$, $K^\top H_e = H_r\Sigma$, eq. (7) and (15), by an SVD of K.

    The signs are those of `fix_signs`, so the same matrix always has the same solution.
    """
    if kernel_matrix.ndim != 2 or kernel_matrix.numel() == 0:
        raise ValueError(f"kernel_matrix must have shape [N, T], got {tuple(kernel_matrix.shape)}")
    left, singular_values, right_t = torch.linalg.svd(kernel_matrix, full_matrices=False)
    noise = torch.finfo(kernel_matrix.dtype).eps * max(kernel_matrix.shape)
    num_nonzero = int((singular_values > noise * singular_values[0]).sum())
    if not 1 <= num_directions <= num_nonzero:
        raise ValueError(
            f"num_directions must be between 1 and {num_nonzero}, the number of nonzero "
            f"singular values of kernel_matrix, got {num_directions!r}"
        )
    h_e, h_r = fix_signs(left[:, :num_directions], right_t[:num_directions].T)
    return DualSolution(h_e, h_r, singular_values[:num_directions])


def fix_signs(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Flip pairs of singular vectors so that the largest entry of each left one is positive."""
    largest = left.abs().argmax(dim=0, keepdim=True)  # [1, S]
    signs = torch.where(left.gather(0, largest) < 0, -1, 1).to(left.dtype)
    return left * signs, right * signs


def weights_from_dual(
    phi_q: Tensor, phi_k: Tensor, h_e: Tensor, h_r: Tensor, f_x: Tensor | None = None
) -> Weights:
    r"""Map the dual to the primal by the first two conditions of eq. (14): [M, S] each.

    $W_e = \sum_j F_X\phi_k(x_j)h_{r_j}^\top$ and $W_r = \sum_i F_X\phi_q(x_i)h_{e_i}^\top$.
    """
    _check_features(phi_q, phi_k, f_x)
    return Weights(_transformed(phi_k, f_x).T @ h_r, _transformed(phi_q, f_x).T @ h_e)


def dual_from_scores(scores: Scores, lambda_diag: Tensor) -> tuple[Tensor, Tensor]:
    r"""Map the primal to the dual by $h_e = \Lambda e$ and $h_r = \Lambda r$ of eq. (14)."""
    return scores.e * lambda_diag, scores.r * lambda_diag


def stationary_point(
    phi_q: Tensor, phi_k: Tensor, num_directions: int, f_x: Tensor | None = None
) -> KSVDPoint:
    """Return the leading solution of eq. (7) with all that belongs to it by eq. (14)."""
    dual = solve_dual(induced_kernel_matrix(phi_q, phi_k, f_x), num_directions)
    weights = weights_from_dual(phi_q, phi_k, dual.h_e, dual.h_r, f_x)
    scores = primal_scores(phi_q, phi_k, *weights_given_x(*weights, f_x))
    return KSVDPoint(*weights, *scores, dual.h_e, dual.h_r, dual.lambda_diag)


def ksvd_objective(scores: Scores, w_e: Tensor, w_r: Tensor, lambda_diag: Tensor) -> Tensor:
    r"""Compute J of eq. (6) and (11), a scalar that is 0 at the solutions of eq. (7) (Lemma 4.2).

    $\frac12\sum_i e_i^\top\Lambda e_i + \frac12\sum_j r_j^\top\Lambda r_j - Tr(W_e^\top W_r)$.
    """
    variances = scores.e.square().sum(0) + scores.r.square().sum(0)  # [S]
    return (lambda_diag * variances).sum() / 2 - (w_e * w_r).sum()


def lagrangian(point: KSVDPoint, phi_q: Tensor, phi_k: Tensor, f_x: Tensor | None = None) -> Tensor:
    """Compute eq. (13): J less the constraints of eq. (12), weighted by the dual variables."""
    scores = Scores(point.e_scores, point.r_scores)
    required = primal_scores(phi_q, phi_k, *weights_given_x(point.w_e, point.w_r, f_x))
    objective = ksvd_objective(scores, point.w_e, point.w_r, point.lambda_diag)
    e_term = (point.h_e * (scores.e - required.e)).sum()
    r_term = (point.h_r * (scores.r - required.r)).sum()
    return objective - e_term - r_term


def kkt_residuals(
    point: KSVDPoint, phi_q: Tensor, phi_k: Tensor, f_x: Tensor | None = None
) -> KKTResiduals:
    """Measure the six conditions of eq. (14): |left - right| / max(|left|, |right|), at most 2."""
    return KKTResiduals(*kkt_distances(point, phi_q, phi_k, f_x).tolist())


def kkt_distances(
    point: KSVDPoint, phi_q: Tensor, phi_k: Tensor, f_x: Tensor | None = None
) -> Tensor:
    """Return `kkt_residuals` as a tensor [6]."""
    weights = weights_from_dual(phi_q, phi_k, point.h_e, point.h_r, f_x)
    scores = Scores(point.e_scores, point.r_scores)
    h_e, h_r = dual_from_scores(scores, point.lambda_diag)
    required = primal_scores(phi_q, phi_k, *weights_given_x(point.w_e, point.w_r, f_x))
    distances = (
        _relative_distance(point.w_r, weights.r),
        _relative_distance(point.w_e, weights.e),
        _relative_distance(point.h_e, h_e),
        _relative_distance(point.h_r, h_r),
        _relative_distance(point.e_scores, required.e),
        _relative_distance(point.r_scores, required.r),
    )
    return torch.stack(distances)


def objective_from_dual(
    kernel_matrix: Tensor, h_e: Tensor, h_r: Tensor, lambda_diag: Tensor
) -> Tensor:
    r"""Compute J of eq. (18) before eq. (15) is used: any dual variables, the rest by eq. (14).

    $\frac12\sum_i h_{e_i}^\top\Lambda^{-1}h_{e_i} + \frac12\sum_j h_{r_j}^\top\Lambda^{-1}h_{r_j}
    - Tr(H_e^\top K H_r)$.
    """
    energies = h_e.square().sum(0) + h_r.square().sum(0)  # [S]
    return (energies / _positive(lambda_diag)).sum() / 2 - (h_e * (kernel_matrix @ h_r)).sum()


def objective_at_solution(h_e: Tensor, h_r: Tensor, singular_values: Tensor) -> Tensor:
    r"""Evaluate the last line of eq. (18): 0 because both vectors of a pair have one length, (19).

    $\frac12\sum_l\sigma_l|h_{e,l}|^2 + \frac12\sum_l\sigma_l|h_{r,l}|^2
    - \sum_l\sigma_l|h_{e,l}|^2$, which eq. (20) shows to be 0.
    """
    e_energy, r_energy = h_e.square().sum(0), h_r.square().sum(0)  # [S]
    return (singular_values * (e_energy / 2 + r_energy / 2 - e_energy)).sum()


def unexplained_energy(
    gram_q: Tensor,
    gram_k: Tensor,
    w_e_given_x: Tensor,
    w_r_given_x: Tensor,
    lambda_diag: Tensor,
    f_x: Tensor | None = None,
) -> Tensor:
    r"""Compute $|K - E\Lambda R^\top|_F^2 / |K|_F^2$ by P x P matrices alone, K never formed.

    With the Gram matrices $G_q = \Phi_q^\top\Phi_q$ and $G_k = \Phi_k^\top\Phi_k$, with
    $A = F_X^\top F_X$ and $D = A - W_{e|X}\Lambda W_{r|X}^\top$, it is the quotient of
    $Tr(G_q D G_k D^\top)$ and $Tr(G_q A G_k A)$.
    """
    eye = torch.eye(len(gram_q), dtype=gram_q.dtype, device=gram_q.device)
    inner = eye if f_x is None else f_x.T @ f_x  # [P, P]
    missing = inner - w_e_given_x * lambda_diag @ w_r_given_x.T  # [P, P]
    return _energy(gram_q, missing, gram_k) / _energy(gram_q, inner, gram_k)


def best_unexplained_energy(singular_values: Tensor, num_directions: int) -> Tensor:
    """Return the least energy that so many directions leave (Eckart, Young), from all values."""
    if not 1 <= num_directions <= len(singular_values):
        raise ValueError(
            f"num_directions must be between 1 and {len(singular_values)}, got {num_directions!r}"
        )
    energies = singular_values.square()
    return energies[num_directions:].sum() / energies.sum()


def svd_of_scores(scores: Scores, lambda_diag: Tensor) -> DualSolution:
    r"""Compute the SVD of $E\Lambda R^\top$ by two QR factorisations, without the N x T product.

    Only this product is determined by the unexplained energy: lambda_diag alone is not a list of
    inverse singular values until E and R have been made orthogonal.
    """
    basis_e, factor_e = torch.linalg.qr(scores.e)  # [N, S], [S, S]
    basis_r, factor_r = torch.linalg.qr(scores.r)  # [T, S], [S, S]
    left, singular_values, right_t = torch.linalg.svd(factor_e * lambda_diag @ factor_r.T)
    return DualSolution(*fix_signs(basis_e @ left, basis_r @ right_t.T), singular_values)


def _transformed(phi: Tensor, f_x: Tensor | None) -> Tensor:
    r"""The rows $F_X\phi(x_i)$: [N, M]."""
    return phi if f_x is None else phi @ f_x.T


def _energy(gram_q: Tensor, matrix: Tensor, gram_k: Tensor) -> Tensor:
    r"""$|\Phi_q M \Phi_k^\top|_F^2 = Tr(G_q M G_k M^\top)$."""
    return (gram_q @ matrix @ gram_k * matrix).sum()


def _relative_distance(left: Tensor, right: Tensor) -> Tensor:
    left, right = left.detach(), right.detach()
    size = torch.maximum(left.norm(), right.norm())
    return torch.where(size > 0, (left - right).norm() / size, 0.0)


def _positive(lambda_diag: Tensor) -> Tensor:
    if not bool((lambda_diag > 0).all()):
        raise ValueError(f"lambda_diag must be positive, got {lambda_diag.tolist()}")
    return lambda_diag


def _check_features(phi_q: Tensor, phi_k: Tensor, f_x: Tensor | None) -> None:
    for name, matrix in (("phi_q", phi_q), ("phi_k", phi_k), ("f_x", f_x)):
        if matrix is not None and (matrix.ndim != 2 or matrix.shape[1] != phi_q.shape[-1]):
            expected = f"[any, {phi_q.shape[-1]}], the features of phi_q"
            raise ValueError(f"{name} must have shape {expected}, got {tuple(matrix.shape)}")
