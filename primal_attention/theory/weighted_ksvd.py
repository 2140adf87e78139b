r"""The KSVD of a kernel that decays with a learned time between tokens.

Every token adds an increment $\delta_t \ge 0$ to the time $a_i = \sum_{t\le i}\delta_t$, and

$\kappa(x_i, x_j) = \exp(-|a_i - a_j|)\,\langle\phi_q(x_i), \phi_k(x_j)\rangle$.

The first factor is the Ornstein-Uhlenbeck (Laplace) kernel. On one sequence it has N features
(`time_features`), so the product is an asymmetric kernel with N P features, and `ksvd` applies to
it as it is. Equation numbers are those of Chen et al. 2023; the kernel is ours. One head, float64.

Queries and keys are the same tokens. The weights are data-independent ($F_X = I$); for others
pass the rows $F_X\phi$ as features. A padded token has $\delta = 0$ and $\phi_q = \phi_k = 0$: it
neither acts nor lets time pass.

Legend: N tokens, P feature dim, S directions.
"""

import torch
from einops import einsum
from torch import Tensor

from primal_attention.theory import ksvd


def learned_times(increments: Tensor, token_mask: Tensor | None = None) -> Tensor:
    r"""Sum the increments of the real tokens: $a_i = \sum_{t\le i}\delta_t$, [N] -> [N].

    Args:
        increments: $\delta_t \ge 0$; the values at padded tokens are ignored.
        token_mask: bool [N], True at real tokens; None for all.
    """
    if increments.ndim != 1:
        raise ValueError(f"increments must have shape [N], got {tuple(increments.shape)}")
    if token_mask is not None:
        increments = torch.where(token_mask, increments, 0)
    if not bool((increments >= 0).all()):
        raise ValueError(f"increments must be at least 0, got {increments.min().item()}")
    return increments.cumsum(0)


def time_kernel_matrix(times: Tensor, other_times: Tensor | None = None) -> Tensor:
    r"""Evaluate $T_{ij} = \exp(-|a_i - b_j|)$ of all pairs: [N, M].

    Args:
        times: a, [N], in any order.
        other_times: b, [M]; a where it is None.
    """
    other_times = times if other_times is None else other_times
    return (times[:, None] - other_times).abs().neg().exp()


def time_features(times: Tensor) -> Tensor:
    r"""Factor the time kernel: the lower triangular L with $L L^\top = T$, [N, N].

    $L_{it} = \exp(-(a_i - a_t))\sqrt{1 - \exp(-2\delta_t)}$ for $1 < t \le i$, and
    $L_{i1} = \exp(-(a_i - a_1))$: column t is what token i remembers of the time between t - 1
    and t. Row i is the feature vector of token i.
    """
    _check_times(times)
    fresh = -torch.expm1(-2 * times.diff())  # [N - 1], 1 - exp(-2 delta)
    return time_kernel_matrix(times).tril() * torch.cat([torch.ones_like(times[:1]), fresh]).sqrt()


def weighted_features(phi: Tensor, times: Tensor) -> Tensor:
    r"""Multiply the two feature maps: row i is $L_i \otimes\phi(x_i)$, [N, N P].

    The inner product of such rows of queries and keys is $\kappa(x_i, x_j)$.
    """
    return einsum(time_features(times), phi, "n t, n p -> n t p").flatten(1)


def weighted_kernel_matrix(phi_q: Tensor, phi_k: Tensor, times: Tensor) -> Tensor:
    r"""Evaluate $K_{ij} = \exp(-|a_i - a_j|)\langle\phi_q(x_i), \phi_k(x_j)\rangle$: [N, N]."""
    _check_tokens(phi_q, phi_k, times)
    return time_kernel_matrix(times) * ksvd.induced_kernel_matrix(phi_q, phi_k)


def solve_weighted_dual(
    phi_q: Tensor, phi_k: Tensor, times: Tensor, num_directions: int
) -> ksvd.DualSolution:
    r"""Solve $K H_r = H_e\Sigma$, $K^\top H_e = H_r\Sigma$, eq. (7), for the weighted kernel.

    There may be up to N directions: the rank of K is not bound by P.
    """
    return ksvd.solve_dual(weighted_kernel_matrix(phi_q, phi_k, times), num_directions)


def weighted_scores(
    phi_q: Tensor, phi_k: Tensor, times: Tensor, h_e: Tensor, h_r: Tensor, *, causal: bool = False
) -> ksvd.Scores:
    r"""Sum the dual representation over pairs, in quadratic time: [N, S] each.

    $e_i = \sum_j\kappa(x_i, x_j)h_r(x_j)$ and $r_i = \sum_j\kappa(x_j, x_i)h_e(x_j)$, eq. (8).
    The causal form keeps $j \le i$ in both sums. So e has the lower triangle of K and r the
    upper one, and these are not two views of one matrix.
    """
    kernel_matrix = weighted_kernel_matrix(phi_q, phi_k, times)
    if causal:
        return ksvd.dual_scores(kernel_matrix.tril(), kernel_matrix.triu(), h_e, h_r)
    return ksvd.dual_scores(kernel_matrix, kernel_matrix, h_e, h_r)


def local_weights(
    phi_q: Tensor, phi_k: Tensor, times: Tensor, h_e: Tensor, h_r: Tensor, *, causal: bool = False
) -> ksvd.Weights:
    r"""Weight the samples for each token, eq. (14) with weights: [N, P, S] each.

    $W_{e|i} = \sum_j\exp(-|a_i - a_j|)\,\phi_k(x_j)h_r(x_j)^\top$ and
    $W_{r|i} = \sum_j\exp(-|a_i - a_j|)\,\phi_q(x_j)h_e(x_j)^\top$; causal: $j \le i$.
    """
    _check_tokens(phi_q, phi_k, times)
    sample_weights = time_kernel_matrix(times)
    sample_weights = sample_weights.tril() if causal else sample_weights
    return ksvd.Weights(
        einsum(sample_weights, phi_k, h_r, "i j, j p, j s -> i p s"),
        einsum(sample_weights, phi_q, h_e, "i j, j p, j s -> i p s"),
    )


def scan_weights(
    phi_q: Tensor, phi_k: Tensor, times: Tensor, h_e: Tensor, h_r: Tensor, *, causal: bool = False
) -> ksvd.Weights:
    r"""Find the local weights in linear time: [N, P, S] each.

    The causal form is one scan from the left,
    $W_i = \exp(-\delta_i)W_{i-1} + \phi(x_i)h(x_i)^\top$; the full form adds the scan from the
    right, with the diagonal counted once.
    """
    _check_tokens(phi_q, phi_k, times)
    return ksvd.Weights(_scan(phi_k, h_r, times, causal), _scan(phi_q, h_e, times, causal))


def local_scores(phi_q: Tensor, phi_k: Tensor, weights: ksvd.Weights) -> ksvd.Scores:
    r"""Project each token on its own weights: $e_i = W_{e|i}^\top\phi_q(x_i)$, $r_i$ alike."""
    return ksvd.Scores(
        einsum(phi_q, weights.e, "n p, n p s -> n s"),
        einsum(phi_k, weights.r, "n p, n p s -> n s"),
    )


def scan_scores(
    phi_q: Tensor, phi_k: Tensor, times: Tensor, h_e: Tensor, h_r: Tensor, *, causal: bool = False
) -> ksvd.Scores:
    """Compute `weighted_scores` in linear time, by one scan (causal) or two."""
    weights = scan_weights(phi_q, phi_k, times, h_e, h_r, causal=causal)
    return local_scores(phi_q, phi_k, weights)


def weight_innovations(weights: ksvd.Weights, times: Tensor) -> ksvd.Weights:
    r"""Take from the weights of each token what its predecessor explains: [N, P, S] each.

    $V_1 = W_{|1}$ and $V_t = (W_{|t} - \rho_t W_{|t-1}) / \sqrt{1 - \rho_t^2}$ with
    $\rho_t = \exp(-\delta_t)$; 0 where $\delta_t = 0$, which makes the two weights equal.
    $W_{|i} = \sum_t L_{it}V_t$, so the $V_t$ are the weights of eq. (6) that belong to
    `weighted_features`, in blocks of P rows.
    """
    return ksvd.Weights(*(_innovations(side, times) for side in weights))


def objective_from_scores(scores: ksvd.Scores, h_e: Tensor, lambda_diag: Tensor) -> Tensor:
    r"""Compute J of eq. (6) and (11) without primal weights, a scalar.

    $\frac12\sum_i e_i^\top\Lambda e_i + \frac12\sum_i r_i^\top\Lambda r_i
    - \sum_i h_e(x_i)^\top e_i$. For scores of both directions the last term is
    $Tr(W_e^\top W_r) = \sum_{ij}\kappa(x_i, x_j)\langle h_e(x_i), h_r(x_j)\rangle$; for causal
    ones it is the part of that sum with $j \le i$.
    """
    return ksvd.ksvd_objective(scores, h_e, scores.e, lambda_diag)


def solve_causal_dual(kernel_matrix: Tensor, num_directions: int) -> ksvd.DualSolution:
    r"""Find where the gradient of the causal J by the dual variables vanishes.

    With $K_L$ = tril(K), invertible, and $K_U$ = triu(K), it vanishes where
    $K_U K_U^\top H_e = H_e\Sigma^2$ and $K_L H_r = H_e\Sigma$. So $H_e$ and $\Sigma$ belong to the
    SVD of the upper triangle; $H_r$ holds no singular vectors.
    """
    diagonal = kernel_matrix.diagonal()
    if not bool(diagonal.all()):
        raise ValueError(
            f"kernel_matrix must have no zero on its diagonal, got {diagonal.tolist()}"
        )
    upper = ksvd.solve_dual(kernel_matrix.triu(), num_directions)
    e_scores = upper.h_e * upper.singular_values
    h_r = torch.linalg.solve_triangular(kernel_matrix.tril(), e_scores, upper=False)
    return upper._replace(h_r=h_r)


def weighted_unexplained_energy(
    phi_q: Tensor, phi_k: Tensor, times: Tensor, scores: ksvd.Scores, lambda_diag: Tensor
) -> Tensor:
    r"""Compute $|K - E\Lambda R^\top|_F^2 / |K|_F^2$ of the full kernel by scans, K never formed.

    The P x P Gram matrices of `unexplained_energy` do not suffice here. But
    $|K|_F^2 = \sum_{ij}\exp(-2|a_i - a_j|)\langle\phi_q(x_i), \phi_k(x_j)\rangle^2$ is a scan with
    the $P^2$ products of two features, and $Tr(E^\top K R\Lambda)$ is one with R in place of
    $H_r$.
    """
    ones = torch.ones_like(times)[:, None]  # [N, 1]
    squares = scan_scores(_products(phi_q), _products(phi_k), 2 * times, ones, ones)
    energy = squares.e.sum()
    image_of_r = scan_scores(phi_q, phi_k, times, scores.e, scores.r).e  # K R, [N, S]
    overlap = (scores.e * lambda_diag * image_of_r).sum()
    gram_e, gram_r = scores.e.T @ scores.e, scores.r.T @ scores.r  # [S, S]
    explained = (torch.outer(lambda_diag, lambda_diag) * gram_e * gram_r).sum()
    return (energy - 2 * overlap + explained) / energy


def _scan(phi: Tensor, h: Tensor, times: Tensor, causal: bool) -> Tensor:
    past = _states(phi, h, times)
    if causal:
        return past
    future = _states(phi.flip(0), h.flip(0), -times.flip(0)).flip(0)
    return past + future - einsum(phi, h, "n p, n s -> n p s")


def _states(phi: Tensor, h: Tensor, times: Tensor) -> Tensor:
    """Run one scan from the left: [N, P, S]."""
    state = phi.new_zeros(phi.shape[1], h.shape[1])
    decays = [1.0, *times.diff().neg().exp()]
    states = []
    for decay, features, dual in zip(decays, phi, h, strict=True):
        state = decay * state + torch.outer(features, dual)
        states.append(state)
    return torch.stack(states)


def _innovations(weights: Tensor, times: Tensor) -> Tensor:
    steps = times.diff()[:, None, None]  # [N - 1, 1, 1]
    news = weights[1:] - steps.neg().exp() * weights[:-1]
    size = torch.where(steps > 0, -torch.expm1(-2 * steps), torch.inf).sqrt()
    return torch.cat([weights[:1], news / size])


def _products(phi: Tensor) -> Tensor:
    """Multiply all pairs of features of each token: [N, P * P]."""
    return einsum(phi, phi, "n p, n q -> n p q").flatten(1)


def _check_times(times: Tensor) -> None:
    if times.ndim != 1 or len(times) == 0:
        raise ValueError(f"times must have shape [N], got {tuple(times.shape)}")
    if not bool((times.diff() >= 0).all()):
        raise ValueError(f"times must not decrease, got {times.tolist()}")


def _check_tokens(phi_q: Tensor, phi_k: Tensor, times: Tensor) -> None:
    _check_times(times)
    for name, phi in (("phi_q", phi_q), ("phi_k", phi_k)):
        if phi.ndim != 2 or len(phi) != len(times):
            expected = f"[{len(times)}, P], a row for each time"
            raise ValueError(f"{name} must have shape {expected}, got {tuple(phi.shape)}")
