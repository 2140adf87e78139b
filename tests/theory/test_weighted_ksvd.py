import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.legendre import leggauss

from primal_attention.theory import Cosine
from primal_attention.theory.ksvd import (
    Scores,
    Weights,
    best_unexplained_energy,
    dual_from_scores,
    dual_scores,
    induced_kernel_matrix,
    kkt_residuals,
    ksvd_objective,
    primal_scores,
    shifted_eigenvalue_matrix,
    solve_dual,
    stationary_point,
    weights_from_dual,
)
from primal_attention.theory.weighted_ksvd import (
    learned_times,
    local_scores,
    local_weights,
    objective_from_scores,
    scan_scores,
    scan_weights,
    solve_causal_dual,
    solve_weighted_dual,
    time_features,
    time_kernel_matrix,
    weight_innovations,
    weighted_features,
    weighted_kernel_matrix,
    weighted_scores,
    weighted_unexplained_energy,
)

N, P, S = 23, 7, 5
ZERO = torch.zeros((), dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_equal(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw_times(length=N, mean=0.4, seed=5):
    return learned_times(mean * randn(length, seed=seed).exp())


def draw_features(length=N, width=P):
    return [Cosine().features(randn(length, width, seed=seed)) for seed in (0, 1)]


@pytest.fixture
def times():
    return draw_times()


@pytest.fixture
def tokens(times):
    """The two features and the times, as all functions take them."""
    return *draw_features(), times


@pytest.fixture
def dual():
    """Any dual variables, of no solution."""
    return randn(N, S, seed=2), randn(N, S, seed=3)


@pytest.fixture
def lambda_diag():
    return randn(S, seed=4).exp()


# The time kernel

increments = st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 40.0]), min_size=1, max_size=12)


@given(increments)
@settings(deadline=None)
def test_time_kernel_is_positive_semi_definite(increments):
    times = learned_times(torch.tensor(increments, dtype=torch.float64))
    time_kernel = time_kernel_matrix(times)
    eigenvalues = torch.linalg.eigvalsh(time_kernel)
    assert eigenvalues.min() > -1e-13
    assert (eigenvalues > 1e-6).sum() == len(times.unique())
    expected = (1 - (-2 * times.diff()).exp()).prod()
    assert_equal(torch.linalg.det(time_kernel), expected, 1e-12)


@given(increments)
@settings(deadline=None)
def test_time_features_factor_the_time_kernel(increments):
    times = learned_times(torch.tensor(increments, dtype=torch.float64))
    factor = time_features(times)
    assert torch.equal(factor, factor.tril())
    assert_equal(factor @ factor.T, time_kernel_matrix(times), 1e-14)
    assert_equal(factor.square().sum(1), torch.ones_like(times), 1e-14)


def test_time_features_are_the_cholesky_factor(times):
    expected = torch.linalg.cholesky(time_kernel_matrix(times))
    assert_equal(time_features(times), expected, 1e-12)


def test_time_kernel_is_an_inner_product_of_fading_traces():
    r"""$g_a(u) = \sqrt2\exp(-(a - u))$ for $u \le a$, of which `time_features` are coordinates."""
    nodes, weights = (torch.from_numpy(part) for part in leggauss(80))
    for a, b in [(0.0, 0.0), (0.3, 1.7), (5.0, 2.0)]:
        u = min(a, b) + 20 * (nodes - 1)  # the 40 units before the earlier of the two
        integral = (20 * weights * 2 * torch.exp(-(a - u) - (b - u))).sum()
        assert_equal(integral, torch.tensor(math.exp(-abs(a - b)), dtype=torch.float64), 1e-13)


def test_only_differences_of_times_matter(tokens, dual):
    phi_q, phi_k, times = tokens
    expected = weighted_scores(*tokens, *dual)
    for shifted in (times + 3, times - times[0]):
        assert_equal(weighted_scores(phi_q, phi_k, shifted, *dual), expected, 1e-12)


# The kernel is an asymmetric kernel in the sense of the paper


def test_kernel_matrix_by_hand(tokens):
    phi_q, phi_k, times = tokens
    kernel_matrix = weighted_kernel_matrix(*tokens)
    for i, j in [(0, 0), (2, 17), (17, 2), (22, 3)]:
        decay = math.exp(-abs(times[i].item() - times[j].item()))
        assert_equal(kernel_matrix[i, j], decay * (phi_q[i] * phi_k[j]).sum(), 1e-14)
    assert (kernel_matrix - kernel_matrix.T).abs().max() > 0.1


def test_features_of_the_product_give_the_kernel(tokens):
    phi_q, phi_k, times = tokens
    features_q, features_k = weighted_features(phi_q, times), weighted_features(phi_k, times)
    assert features_q.shape == (N, N * P)
    kernel_matrix = induced_kernel_matrix(features_q, features_k)
    assert_equal(kernel_matrix, weighted_kernel_matrix(*tokens), 1e-14)


def test_solution_of_the_shifted_eigenvalue_problem(tokens):
    kernel_matrix = weighted_kernel_matrix(*tokens)
    h_e, h_r, singular_values = solution = solve_weighted_dual(*tokens, S)
    assert_equal(kernel_matrix @ h_r, h_e * singular_values)
    assert_equal(kernel_matrix.T @ h_e, h_r * singular_values)
    stacked = torch.cat([h_e, h_r])
    expected = stacked / solution.lambda_diag
    assert_equal(shifted_eigenvalue_matrix(kernel_matrix) @ stacked, expected)
    assert_equal(h_e.T @ h_e, torch.eye(S, dtype=torch.float64))
    assert_equal(h_r.T @ h_r, torch.eye(S, dtype=torch.float64))


def test_theory_of_the_plain_kernel_applies_to_the_features_of_the_product(tokens):
    phi_q, phi_k, times = tokens
    features = weighted_features(phi_q, times), weighted_features(phi_k, times)
    point = stationary_point(*features, S)
    assert kkt_residuals(point, *features).max < 1e-10
    solution = solve_weighted_dual(*tokens, S)
    assert_equal(point.h_e, solution.h_e)
    assert_equal(point.h_r, solution.h_r)
    assert_equal(point.lambda_diag, solution.lambda_diag)


def test_primal_scores_equal_dual_scores(tokens, dual):
    phi_q, phi_k, times = tokens
    features = weighted_features(phi_q, times), weighted_features(phi_k, times)
    primal = primal_scores(*features, *weights_from_dual(*features, *dual))
    assert_equal(primal, weighted_scores(*tokens, *dual), 1e-12)


def test_primal_scores_equal_dual_scores_at_new_tokens(dual):
    """New tokens between, before and after the old ones; all times share one factor."""
    new = torch.arange(N + 13) % 3 == 0
    new[-1] = True
    is_old = ~new
    assert is_old.sum() == N
    phi_q, phi_k = draw_features(N + 13)
    times = draw_times(N + 13)
    features_q, features_k = weighted_features(phi_q, times), weighted_features(phi_k, times)
    weights = weights_from_dual(features_q[is_old], features_k[is_old], *dual)
    primal = primal_scores(features_q[new], features_k[new], *weights)
    from_new = time_kernel_matrix(times[new], times[is_old])
    expected = dual_scores(
        from_new * induced_kernel_matrix(phi_q[new], phi_k[is_old]),
        from_new.T * induced_kernel_matrix(phi_q[is_old], phi_k[new]),
        *dual,
    )
    assert_equal(primal, expected, 1e-12)


# The objective


def objective(tokens, h_e, h_r, lambda_diag, *, causal=False):
    scores = weighted_scores(*tokens, h_e, h_r, causal=causal)
    return objective_from_scores(scores, h_e, lambda_diag)


def gradients(tokens, h_e, h_r, lambda_diag, *, causal=False):
    variables = [h_e.clone().requires_grad_(), h_r.clone().requires_grad_()]
    return torch.autograd.grad(objective(tokens, *variables, lambda_diag, causal=causal), variables)


def test_trace_identity(tokens, dual):
    phi_q, phi_k, times = tokens
    h_e, h_r = dual
    features = weighted_features(phi_q, times), weighted_features(phi_k, times)
    w_e, w_r = weights_from_dual(*features, h_e, h_r)
    trace = (w_e * w_r).sum()
    pairs = (weighted_kernel_matrix(*tokens) * (h_e @ h_r.T)).sum()
    scores = scan_scores(*tokens, h_e, h_r)
    assert_equal(pairs, trace, 1e-13)
    assert_equal((h_e * scores.e).sum(), trace, 1e-13)
    assert_equal((h_r * scores.r).sum(), trace, 1e-13)


def test_objective_equals_the_primal_one_for_any_dual_variables(tokens, dual, lambda_diag):
    phi_q, phi_k, times = tokens
    features = weighted_features(phi_q, times), weighted_features(phi_k, times)
    weights = weights_from_dual(*features, *dual)
    primal = ksvd_objective(primal_scores(*features, *weights), *weights, lambda_diag)
    assert abs(primal) > 1
    assert_equal(objective(tokens, *dual, lambda_diag), primal, 1e-12)


def test_objective_and_its_gradient_vanish_at_the_solution(tokens):
    h_e, h_r, singular_values = solution = solve_weighted_dual(*tokens, S)
    value = objective(tokens, h_e, h_r, solution.lambda_diag)
    assert_equal(value / singular_values.sum(), ZERO, 1e-13)
    for gradient in gradients(tokens, h_e, h_r, solution.lambda_diag):
        assert_equal(gradient / singular_values, torch.zeros_like(gradient), 1e-12)


def test_gradient_vanishes_at_solutions_only(tokens, dual, lambda_diag):
    """It is K or its transpose times the residual of eq. (7), and K is invertible."""
    h_e, h_r = dual
    kernel_matrix = weighted_kernel_matrix(*tokens)
    gradient_e, gradient_r = gradients(tokens, h_e, h_r, lambda_diag)
    left, right = kernel_matrix.T @ h_e * lambda_diag - h_r, kernel_matrix @ h_r * lambda_diag - h_e
    assert_equal(gradient_e, kernel_matrix @ left, 1e-12)
    assert_equal(gradient_r, kernel_matrix.T @ right, 1e-12)
    assert torch.linalg.matrix_rank(kernel_matrix) == N


def test_solution_is_a_saddle_of_the_objective(tokens):
    """Along larger singular pairs J rises, along smaller ones it falls without bound."""
    h_e, h_r, singular_values = solve_weighted_dual(*tokens, N)
    lambda_diag = 1 / singular_values[3].expand(1)
    pairs = [(10 * h_e[:, [pair]], 10 * h_r[:, [pair]]) for pair in range(N)]
    values = [objective(tokens, *pair, lambda_diag) for pair in pairs]
    sigma = singular_values
    assert_equal(torch.stack(values), 100 * (sigma.square() / sigma[3] - sigma), 1e-10)
    assert min(values[:3]) > 0 > max(values[4:])


# Scans


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mean", [0.0, 1e-3, 0.4, 30.0])
def test_scans_equal_the_dense_sums(mean, causal, dual):
    tokens = *draw_features(), draw_times(mean=mean)
    scanned = scan_scores(*tokens, *dual, causal=causal)
    expected = weighted_scores(*tokens, *dual, causal=causal)
    for actual, wanted in zip(scanned, expected, strict=True):
        assert_equal(actual / wanted.abs().max(), wanted / wanted.abs().max(), 1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_states_of_the_scans_are_the_local_weights(tokens, dual, causal):
    scanned = scan_weights(*tokens, *dual, causal=causal)
    assert scanned.e.shape == scanned.r.shape == (N, P, S)
    weights = local_weights(*tokens, *dual, causal=causal)
    assert_equal(scanned, weights, 1e-13)
    expected = weighted_scores(*tokens, *dual, causal=causal)
    assert_equal(local_scores(*tokens[:2], weights), expected, 1e-13)


# Sample weights


def test_local_weights_by_hand(tokens, dual):
    phi_q, phi_k, times = tokens
    h_e, h_r = dual
    weights = local_weights(*tokens, h_e, h_r)
    for i in (0, 11, N - 1):
        sample_weights = torch.exp(-(times - times[i]).abs())[:, None]
        expected = weights_from_dual(phi_q, phi_k, sample_weights * h_e, sample_weights * h_r)
        assert_equal(Weights(weights.e[i], weights.r[i]), expected, 1e-13)


def test_innovations_are_the_weights_of_the_product_features(tokens, dual):
    phi_q, phi_k, times = tokens
    features = weighted_features(phi_q, times), weighted_features(phi_k, times)
    innovations = weight_innovations(local_weights(*tokens, *dual), times)
    flat = Weights(*(side.flatten(0, 1) for side in innovations))
    assert_equal(flat, weights_from_dual(*features, *dual), 1e-12)


def test_local_weights_are_sums_of_innovations(times):
    weights = Weights(randn(N, P, S), randn(N, P, S, seed=1))
    innovations = weight_innovations(weights, times)
    for side, news in zip(weights, innovations, strict=True):
        assert_equal(torch.tensordot(time_features(times), news, 1), side, 1e-12)


def local_lagrangian(tokens, lambda_diag, variables):
    """Eq. (13) with a weight matrix for each token; the trace couples neighbours."""
    w_e, w_r, e, r, h_e, h_r = variables
    phi_q, phi_k, times = tokens
    innovations = weight_innovations(Weights(w_e, w_r), times)
    required = local_scores(phi_q, phi_k, Weights(w_e, w_r))
    value = ksvd_objective(Scores(e, r), *innovations, lambda_diag)
    return value - (h_e * (e - required.e)).sum() - (h_r * (r - required.r)).sum()


def gradients_of_local_lagrangian(tokens, lambda_diag, variables):
    variables = [each.clone().requires_grad_() for each in variables]
    return torch.autograd.grad(local_lagrangian(tokens, lambda_diag, variables), variables)


def test_solution_is_stationary_with_a_weight_matrix_for_each_token(tokens):
    solution = solve_weighted_dual(*tokens, S)
    h_e, h_r = solution.h_e, solution.h_r
    variables = [
        *local_weights(*tokens, h_e, h_r),
        *weighted_scores(*tokens, h_e, h_r),
        *(h_e, h_r),
    ]
    for gradient in gradients_of_local_lagrangian(tokens, solution.lambda_diag, variables):
        assert_equal(gradient, torch.zeros_like(gradient))


def test_derivatives_by_the_weights_ask_for_sample_weights(tokens, dual, lambda_diag):
    """For any dual variables: the weights that make both derivatives 0 are the local ones."""
    scores = randn(N, S, seed=6), randn(N, S, seed=7)
    weights = local_weights(*tokens, *dual)
    variables = [*weights, *scores, *dual]
    for gradient in gradients_of_local_lagrangian(tokens, lambda_diag, variables)[:2]:
        assert_equal(gradient, torch.zeros_like(gradient))
    variables[:2] = [1.1 * weights.e, 1.1 * weights.r]
    for gradient in gradients_of_local_lagrangian(tokens, lambda_diag, variables)[:2]:
        assert gradient.abs().max() > 0.01


def test_usual_sample_weights_are_a_factor_of_rank_one(tokens):
    r"""Variances weighted by v and u: $h_e = v\Lambda e$ and $h_r = u\Lambda r$, eq. (14)."""
    plain = induced_kernel_matrix(*tokens[:2])
    v, u = randn(N, 1, seed=6).exp(), randn(N, 1, seed=7).exp()
    solution = solve_dual(v.sqrt() * plain * u.sqrt().T, S)
    h_e, h_r = v.sqrt() * solution.h_e, u.sqrt() * solution.h_r
    e, r = dual_scores(plain, plain, h_e, h_r)
    assert_equal(v * e * solution.lambda_diag, h_e)
    assert_equal(u * r * solution.lambda_diag, h_r)


def test_weighted_problem_of_one_token_alone_is_another(tokens):
    """Sample weights of one token are of rank 1 and cannot raise the rank; those of all do."""
    phi_q, phi_k, times = tokens
    root = time_kernel_matrix(times)[11].sqrt()
    plain = induced_kernel_matrix(phi_q, phi_k)
    assert torch.linalg.matrix_rank(torch.outer(root, root) * plain) == P
    together = [torch.outer(column, column) * plain for column in time_features(times).T]
    assert_equal(torch.stack(together).sum(0), weighted_kernel_matrix(*tokens), 1e-13)


# Rank


def test_rank_is_not_bound_by_the_number_of_features():
    phi_q, phi_k = draw_features(40, 6)
    times = draw_times(40)
    assert torch.linalg.matrix_rank(induced_kernel_matrix(phi_q, phi_k)) == 6
    assert torch.linalg.matrix_rank(weighted_kernel_matrix(phi_q, phi_k, times)) == 40
    assert solve_weighted_dual(phi_q, phi_k, times, 40).singular_values.min() > 1e-6


def test_rank_is_full_where_the_maps_agree(times):
    """Oppenheim: det(T * G) is at least det(T) times the diagonal of G."""
    phi = randn(N, 2)
    kernel_matrix = weighted_kernel_matrix(phi, phi, times)
    bound = torch.linalg.slogdet(time_kernel_matrix(times)).logabsdet
    bound += phi.square().sum(1).log().sum()
    assert torch.linalg.eigvalsh(kernel_matrix).min() > 0
    assert torch.linalg.slogdet(kernel_matrix).logabsdet > bound


def test_one_feature_suffices_for_full_rank(times):
    phi_q, phi_k = randn(N, 1), randn(N, 1, seed=1)
    assert torch.linalg.matrix_rank(weighted_kernel_matrix(phi_q, phi_k, times)) == N


def test_time_can_also_lower_the_rank():
    """Full rank is no theorem for two different maps."""
    times = torch.tensor([0.0, 0.5], dtype=torch.float64)
    decay = math.exp(-0.5)
    phi_q = torch.tensor([[1.0, 1.0], [1.0, decay**2]], dtype=torch.float64)
    phi_k = torch.eye(2, dtype=torch.float64)
    assert torch.linalg.matrix_rank(induced_kernel_matrix(phi_q, phi_k)) == 2
    assert torch.linalg.matrix_rank(weighted_kernel_matrix(phi_q, phi_k, times)) == 1


def test_causal_mask_alone_has_full_rank_too():
    phi_q, phi_k = draw_features(40, 6)
    assert torch.linalg.matrix_rank(induced_kernel_matrix(phi_q, phi_k).tril()) == 40


# Limits of time


def test_no_time_is_the_plain_ksvd(dual):
    phi_q, phi_k = draw_features()
    tokens = phi_q, phi_k, torch.zeros(N, dtype=torch.float64)
    plain = induced_kernel_matrix(phi_q, phi_k)
    assert_equal(weighted_kernel_matrix(*tokens), plain, 0)
    assert_equal(solve_weighted_dual(*tokens, S), solve_dual(plain, S))
    weights = weights_from_dual(phi_q, phi_k, *dual)
    local = local_weights(*tokens, *dual)
    assert_equal(local.e, weights.e.expand(N, P, S), 1e-13)
    innovations = weight_innovations(local, tokens[2])
    assert_equal(Weights(innovations.e[0], innovations.r[0]), weights, 1e-13)
    assert innovations.e[1:].abs().max() == innovations.r[1:].abs().max() == 0
    nearly = weighted_kernel_matrix(phi_q, phi_k, draw_times(mean=1e-9))
    assert_equal(nearly, plain, 1e-6)


def test_endless_time_leaves_the_diagonal(dual):
    phi_q, phi_k = draw_features()
    h_e, h_r = dual
    tokens = phi_q, phi_k, 1000 * torch.arange(N, dtype=torch.float64)
    diagonal = (phi_q * phi_k).sum(1, keepdim=True)
    assert_equal(weighted_kernel_matrix(*tokens), diagonal[:, 0].diag(), 1e-14)
    for causal in (False, True):
        scores = scan_scores(*tokens, h_e, h_r, causal=causal)
        assert_equal(scores, Scores(diagonal * h_r, diagonal * h_e), 1e-14)


# Padding

MASKS = {
    "left": torch.arange(N) >= 6,
    "right": torch.arange(N) < 17,
    "holes": torch.arange(N) % 4 != 1,
}


def masked_tokens(mask, increments):
    """Features of zeros at padding, and times that stand still there."""
    features = [torch.where(mask[:, None], phi, 0) for phi in draw_features()]
    return *features, learned_times(increments, mask)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_neither_acts_nor_lets_time_pass(mask, causal, dual, lambda_diag):
    increments = torch.where(mask, randn(N, seed=8).exp(), torch.nan)
    tokens = masked_tokens(mask, increments)
    h_e, h_r = (torch.where(mask[:, None], h, 0) for h in dual)
    phi_q, phi_k = (phi[mask] for phi in draw_features())
    alone = phi_q, phi_k, learned_times(increments[mask])
    expected = weighted_scores(*alone, h_e[mask], h_r[mask], causal=causal)
    for compute in (weighted_scores, scan_scores):
        scores = compute(*tokens, h_e, h_r, causal=causal)
        for side, wanted in zip(scores, expected, strict=True):
            assert_equal(side[mask], wanted, 1e-13)
            assert side[~mask].abs().max() == 0
        value = objective_from_scores(scores, h_e, lambda_diag)
        assert_equal(value, objective_from_scores(expected, h_e[mask], lambda_diag), 1e-12)
        assert_equal(compute(*tokens, *dual, causal=causal), scores, 1e-13)  # phi = 0 suffices
    late = *tokens[:2], learned_times(increments.nan_to_num(1.0))
    if mask is MASKS["holes"]:
        assert (scan_scores(*late, h_e, h_r, causal=causal).e[mask] - expected.e).abs().max() > 0.1


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_solution_is_zero_at_padding(mask):
    increments = randn(N, seed=8).exp()
    solution = solve_weighted_dual(*masked_tokens(mask, increments), S)
    phi_q, phi_k = (phi[mask] for phi in draw_features())
    expected = solve_weighted_dual(phi_q, phi_k, learned_times(increments[mask]), S)
    assert_equal(solution.singular_values, expected.singular_values)
    for side, wanted in [(solution.h_e, expected.h_e), (solution.h_r, expected.h_r)]:
        assert_equal(side[mask], wanted)
        assert side[~mask].abs().max() < 1e-12


# The causal form


def test_causal_scores_are_those_of_the_last_token_of_each_prefix(tokens, dual):
    causal = weighted_scores(*tokens, *dual, causal=True)
    for end in (1, 2, 12, N):
        prefix = weighted_scores(*(each[:end] for each in (*tokens, *dual)))
        last = Scores(causal.e[end - 1], causal.r[end - 1])
        assert_equal(last, Scores(prefix.e[-1], prefix.r[-1]), 1e-13)


def test_causal_scores_have_the_two_triangles(tokens, dual):
    h_e, h_r = dual
    kernel_matrix = weighted_kernel_matrix(*tokens)
    scores = weighted_scores(*tokens, h_e, h_r, causal=True)
    assert_equal(scores.e, kernel_matrix.tril() @ h_r, 1e-13)
    assert_equal(scores.r, kernel_matrix.T.tril() @ h_e, 1e-13)
    e_trace, r_trace = (h_e * scores.e).sum(), (h_r * scores.r).sum()
    diagonal = (kernel_matrix.diagonal()[:, None] * h_e * h_r).sum()
    trace = (h_e * (kernel_matrix @ h_r)).sum()
    assert_equal(e_trace + r_trace, trace + diagonal, 1e-12)
    assert abs(e_trace - r_trace) > 1


def test_causal_eigenvalue_problem_knows_the_diagonal_only(tokens):
    """Its squared eigenvalues are those of a triangular matrix, the squared diagonal of K."""
    kernel_matrix = weighted_kernel_matrix(*tokens)
    product = kernel_matrix.tril() @ kernel_matrix.triu().T
    assert torch.equal(product, product.tril())
    assert_equal(product.diagonal(), kernel_matrix.diagonal().square(), 1e-14)


def test_causal_objective_is_not_zero_at_the_solution(tokens):
    h_e, h_r, singular_values = solution = solve_weighted_dual(*tokens, S)
    value = objective(tokens, h_e, h_r, solution.lambda_diag, causal=True)
    assert abs(value) > 0.01 * singular_values.sum()


def test_causal_objective_is_stationary_at_the_decomposition_of_the_upper_triangle(tokens):
    kernel_matrix = weighted_kernel_matrix(*tokens)
    h_e, h_r, singular_values = solution = solve_causal_dual(kernel_matrix, S)
    lambda_diag = solution.lambda_diag
    assert_equal(singular_values, torch.linalg.svdvals(kernel_matrix.triu())[:S])
    value = objective(tokens, h_e, h_r, lambda_diag, causal=True)
    assert_equal(value / singular_values.sum(), ZERO)
    for gradient in gradients(tokens, h_e, h_r, lambda_diag, causal=True):
        assert_equal(gradient / singular_values, torch.zeros_like(gradient), 1e-9)
    scores = weighted_scores(*tokens, h_e, h_r, causal=True)
    from_e, from_r = dual_from_scores(scores, lambda_diag)
    assert_equal(from_e, h_e)
    assert (from_r - h_r).abs().max() > 0.1
    for side in scores:
        assert_equal(side.T @ side, singular_values.square().diag())


# Unexplained energy


def test_unexplained_energy_by_scans_equals_its_dense_form(tokens, lambda_diag):
    kernel_matrix = weighted_kernel_matrix(*tokens)
    scores = Scores(randn(N, S, seed=6), randn(N, S, seed=7))
    missing = kernel_matrix - scores.e * lambda_diag @ scores.r.T
    expected = missing.square().sum() / kernel_matrix.square().sum()
    actual = weighted_unexplained_energy(*tokens, scores, lambda_diag)
    assert_equal(actual, expected, 1e-12)


def test_unexplained_energy_is_the_best_possible_at_the_solution(tokens):
    solution = solve_weighted_dual(*tokens, S)
    scores = scan_scores(*tokens, solution.h_e, solution.h_r)
    best = best_unexplained_energy(torch.linalg.svdvals(weighted_kernel_matrix(*tokens)), S)
    assert 0.01 < best < 0.9
    actual = weighted_unexplained_energy(*tokens, scores, solution.lambda_diag)
    assert_equal(actual, best, 1e-12)


# Input


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: learned_times(randn(N)), "increments must be at least 0, got -"),
        (lambda: learned_times(torch.tensor([0.1, torch.nan])), "increments .* got nan"),
        (lambda: learned_times(randn(N, 2)), r"increments .* \[N\], got \(23, 2\)"),
        (lambda: time_features(randn(3)), r"times must not decrease, got \[1"),
        (lambda: time_features(randn(0)), r"times must have shape \[N\], got \(0,\)"),
        (
            lambda: weighted_kernel_matrix(randn(N, P), randn(N - 1, P), draw_times()),
            r"phi_k must have shape \[23, P\].*got \(22, 7\)",
        ),
        (
            lambda: solve_causal_dual(torch.ones(3, 3).tril(-1) + torch.eye(3).roll(1), 1),
            "kernel_matrix must have no zero on its diagonal",
        ),
        (
            lambda: scan_scores(randn(N), randn(N, P), draw_times(), randn(N, S), randn(N, S)),
            r"phi_q must have shape .*got \(23,\)",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
