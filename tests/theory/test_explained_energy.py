import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.theory import (
    Cosine,
    Scores,
    best_unexplained_energy,
    induced_kernel_matrix,
    ksvd_objective,
    primal_scores,
    stationary_point,
    svd_of_scores,
    unexplained_energy,
    weights_given_x,
)

N, T, P, M, S = 23, 19, 7, 11, 5


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_equal(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=[N, T], ids=["square", "rectangular"])
def features(request):
    return Cosine().features(randn(N, P)), Cosine().features(randn(request.param, P, seed=1))


@pytest.fixture(params=[None, M], ids=["data-independent", "data-dependent"])
def f_x(request):
    return None if request.param is None else randn(request.param, P, seed=2)


def test_unexplained_energy_equals_its_dense_form(features, f_x):
    phi_q, phi_k = features
    w_e, w_r = randn(P, S), randn(P, S, seed=1)
    lambda_diag = randn(S, seed=2).exp()
    kernel_matrix = induced_kernel_matrix(phi_q, phi_k, f_x)
    e, r = primal_scores(phi_q, phi_k, w_e, w_r)
    dense = (kernel_matrix - e * lambda_diag @ r.T).square().sum() / kernel_matrix.square().sum()
    grams = phi_q.T @ phi_q, phi_k.T @ phi_k
    assert_equal(unexplained_energy(*grams, w_e, w_r, lambda_diag, f_x), dense)


def test_unexplained_energy_is_the_best_possible_at_the_solution(features, f_x):
    phi_q, phi_k = features
    point = stationary_point(phi_q, phi_k, S, f_x)
    singular_values = torch.linalg.svdvals(induced_kernel_matrix(phi_q, phi_k, f_x))
    best = best_unexplained_energy(singular_values, S)
    weights = weights_given_x(point.w_e, point.w_r, f_x)
    grams = phi_q.T @ phi_q, phi_k.T @ phi_k
    assert 0 < best < 1
    assert_equal(unexplained_energy(*grams, *weights, point.lambda_diag, f_x), best)
    assert best_unexplained_energy(singular_values, len(singular_values)) == 0


@given(seed=st.integers(0, 50), size=st.integers(1, S))
def test_svd_of_scores_equals_the_svd_of_the_product(seed, size):
    scores = Scores(randn(N, size, seed=seed), randn(T, size, seed=seed + 1))
    lambda_diag = randn(size, seed=seed + 2).exp()
    product = scores.e * lambda_diag @ scores.r.T
    dual = svd_of_scores(scores, lambda_diag)
    assert_equal(dual.singular_values, torch.linalg.svdvals(product)[:size])
    assert_equal(dual.h_e * dual.singular_values @ dual.h_r.T, product)


def minimise(objective, num_steps=600):
    """The setting of docs/theory.md: what an objective leaves unexplained, and the best possible.

    Returns J^2, the unexplained energy, the best possible one and the singular values found and
    true.
    """
    num_tokens, feature_dim, num_directions = 256, 32, 10
    widths = torch.linspace(2, 0.2, feature_dim, dtype=torch.float64)
    phi_q, phi_k = (
        Cosine().features(randn(num_tokens, feature_dim, seed=s) * widths) for s in (0, 1)
    )
    grams = phi_q.T @ phi_q, phi_k.T @ phi_k
    w_e, w_r = (
        torch.linalg.qr(randn(feature_dim, num_directions, seed=s)).Q.requires_grad_()
        for s in (2, 3)
    )
    raw_lambda = torch.zeros(num_directions, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([w_e, w_r, raw_lambda], lr=2e-2)

    def measure():
        scores = primal_scores(phi_q, phi_k, w_e, w_r)
        j_squared = ksvd_objective(scores, w_e, w_r, raw_lambda.exp()).square()
        return j_squared, unexplained_energy(*grams, w_e, w_r, raw_lambda.exp())

    for _ in range(num_steps):
        optimizer.zero_grad()
        measure()[objective].backward()
        optimizer.step()
    with torch.no_grad():
        j_squared, unexplained = measure()
        found = svd_of_scores(primal_scores(phi_q, phi_k, w_e, w_r), raw_lambda.exp())
        true = torch.linalg.svdvals(induced_kernel_matrix(phi_q, phi_k))
    best = best_unexplained_energy(true, num_directions)
    return j_squared, unexplained, best, found.singular_values, true[:num_directions]


def test_minimising_the_squared_objective_explains_almost_nothing():
    j_squared, unexplained, best, _, _ = minimise(objective=0)
    assert j_squared < 1e-10
    assert unexplained > 0.9
    assert best < 0.2


def test_minimising_the_unexplained_energy_finds_the_singular_values():
    _, unexplained, best, found, true = minimise(objective=1)
    assert 0 <= unexplained - best < 1e-3
    torch.testing.assert_close(found, true, rtol=1e-3, atol=0)
