import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.theory import Cosine
from primal_attention.theory.ksvd import (
    KSVDPoint,
    Scores,
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


@pytest.fixture
def point(features, f_x):
    return stationary_point(*features, S, f_x)


def random_point(num_queries, num_keys, rows):
    shapes = [(rows, S), (rows, S), (num_queries, S), (num_keys, S), (num_queries, S)]
    tensors = [randn(*shape, seed=seed) for seed, shape in enumerate([*shapes, (num_keys, S)])]
    return KSVDPoint(*tensors, lambda_diag=randn(S, seed=9).exp())


def scores_of(point):
    return Scores(point.e_scores, point.r_scores)


def test_kernel_matrix_is_the_inner_product_of_transformed_features(features, f_x):
    phi_q, phi_k = features
    inner = torch.eye(P, dtype=phi_q.dtype) if f_x is None else f_x.T @ f_x
    assert_equal(induced_kernel_matrix(phi_q, phi_k, f_x), phi_q @ inner @ phi_k.T)


def test_primal_scores_equal_dual_scores(features, f_x, point):
    kernel_matrix = induced_kernel_matrix(*features, f_x)
    dual = dual_scores(kernel_matrix, kernel_matrix, point.h_e, point.h_r)
    assert_equal(point.e_scores, dual.e)
    assert_equal(point.r_scores, dual.r)
    assert_equal(dual.e, point.h_e / point.lambda_diag)
    assert_equal(dual.r, point.h_r / point.lambda_diag)


def test_primal_scores_equal_dual_scores_out_of_sample(features, f_x, point):
    phi_q, phi_k = features
    new_q, new_k = Cosine().features(randn(13, P, seed=3)), Cosine().features(randn(3, P, seed=4))
    primal = primal_scores(new_q, new_k, *weights_given_x(point.w_e, point.w_r, f_x))
    kernel_of_queries = induced_kernel_matrix(new_q, phi_k, f_x)
    kernel_of_keys = induced_kernel_matrix(phi_q, new_k, f_x)
    dual = dual_scores(kernel_of_queries, kernel_of_keys, point.h_e, point.h_r)
    assert primal.e.shape == (13, S)
    assert primal.r.shape == (3, S)
    assert_equal(primal.e, dual.e)
    assert_equal(primal.r, dual.r)


def test_shifted_eigenvalue_problem(features, f_x):
    kernel_matrix = induced_kernel_matrix(*features, f_x)
    dual = solve_dual(kernel_matrix, S)
    assert_equal(kernel_matrix @ dual.h_r, dual.h_e * dual.singular_values)
    assert_equal(kernel_matrix.T @ dual.h_e, dual.h_r * dual.singular_values)
    block = shifted_eigenvalue_matrix(kernel_matrix)
    stacked = torch.cat([dual.h_e, dual.h_r])
    assert_equal(block @ stacked, stacked / dual.lambda_diag)
    eigenvalues = torch.linalg.eigvalsh(block)
    assert_equal(eigenvalues.flip(0)[:S], dual.singular_values)
    assert_equal(eigenvalues, -eigenvalues.flip(0))


def test_solution_is_orthonormal_ordered_and_positive(features, f_x):
    dual = solve_dual(induced_kernel_matrix(*features, f_x), S)
    eye = torch.eye(S, dtype=torch.float64)
    assert_equal(dual.h_e.T @ dual.h_e, eye)
    assert_equal(dual.h_r.T @ dual.h_r, eye)
    assert (dual.singular_values.diff() <= 0).all()
    assert (dual.singular_values > 0).all()


@given(signs=st.lists(st.sampled_from([-1.0, 1.0]), min_size=S, max_size=S))
def test_signs_do_not_depend_on_the_solver(signs):
    dual = solve_dual(randn(N, T), S)
    flips = torch.tensor(signs, dtype=torch.float64)
    flipped = svd_of_scores(Scores(dual.h_e * flips, dual.h_r * flips), dual.singular_values)
    assert_equal(flipped.h_e, dual.h_e)
    assert_equal(flipped.h_r, dual.h_r)
    assert (dual.h_e.gather(0, dual.h_e.abs().argmax(0, keepdim=True)) > 0).all()


def test_objective_is_zero_at_the_solution(features, f_x, point):
    """Lemma 4.2, and its proof line by line: eq. (18), (19), (20)."""
    kernel_matrix = induced_kernel_matrix(*features, f_x)
    _, _, _, _, h_e, h_r, lambda_diag = point
    size = (1 / lambda_diag).sum()
    lines = [
        ksvd_objective(scores_of(point), point.w_e, point.w_r, lambda_diag),
        objective_from_dual(kernel_matrix, h_e, h_r, lambda_diag),
        objective_at_solution(h_e, h_r, 1 / lambda_diag),
    ]
    assert_equal(torch.stack(lines) / size, torch.zeros(3, dtype=torch.float64))
    assert_equal(h_e.square().sum(0), h_r.square().sum(0))


def test_objective_is_zero_at_every_stationary_point_and_scaling(features, f_x):
    """Not only the leading triplets and not only unit vectors: J = 0 selects no solution."""
    kernel_matrix = induced_kernel_matrix(*features, f_x)
    dual = solve_dual(kernel_matrix, P)
    chosen, factor = torch.tensor([1, 4, 6]), torch.tensor([0.1, 2.0, 30.0])
    h_e, h_r = dual.h_e[:, chosen] * factor, dual.h_r[:, chosen] * factor
    weights = weights_from_dual(*features, h_e, h_r, f_x)
    scores = primal_scores(*features, *weights_given_x(*weights, f_x))
    objective = ksvd_objective(scores, *weights, dual.lambda_diag[chosen])
    assert_equal(objective / dual.singular_values[0], torch.zeros((), dtype=torch.float64))


def test_objective_by_hand():
    scores = Scores(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]]))
    w_e, w_r = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]])
    objective = ksvd_objective(scores, w_e, w_r, torch.tensor([2.0, 10.0]))
    assert objective.item() == (1 * 2 + 4 * 10) / 2 + (9 * 2 + 1 * 2 + 1 * 10) / 2 - (3 + 10)


def test_objective_from_dual_equals_the_primal_one_for_any_dual_variables(features, f_x):
    """Eq. (18) up to its use of (15): substitute (14) for the weights and for the scores."""
    phi_q, phi_k = features
    h_e, h_r = randn(len(phi_q), S), randn(len(phi_k), S, seed=1)
    lambda_diag = randn(S, seed=2).exp()
    weights = weights_from_dual(phi_q, phi_k, h_e, h_r, f_x)
    primal = ksvd_objective(Scores(h_e / lambda_diag, h_r / lambda_diag), *weights, lambda_diag)
    kernel_matrix = induced_kernel_matrix(phi_q, phi_k, f_x)
    assert_equal(objective_from_dual(kernel_matrix, h_e, h_r, lambda_diag), primal)


def test_kkt_residuals_vanish_at_the_solution_only(features, f_x, point):
    assert kkt_residuals(point, *features, f_x).max < 1e-10
    elsewhere = random_point(len(features[0]), len(features[1]), len(point.w_e))
    residuals = kkt_residuals(elsewhere, *features, f_x)
    assert min(residuals) > 0.5
    assert residuals.max <= 2


@pytest.mark.parametrize("name", ["w_e", "w_r", "e_scores", "r_scores", "h_e", "h_r"])
def test_each_variable_breaks_its_own_conditions(features, f_x, point, name):
    moved = point._replace(**{name: getattr(point, name) * 1.5})
    residuals = kkt_residuals(moved, *features, f_x)._asdict()
    broken = {condition for condition, value in residuals.items() if value > 0.1}
    expected = {
        "w_e": {"w_e", "e_scores"},
        "w_r": {"w_r", "r_scores"},
        "e_scores": {"h_e", "e_scores"},
        "r_scores": {"h_r", "r_scores"},
        "h_e": {"w_r", "h_e"},
        "h_r": {"w_e", "h_r"},
    }
    assert broken == expected[name]


def test_lagrangian_is_stationary_at_the_solution(features, f_x, point):
    """Eq. (14) is the gradient of eq. (13); Lambda is a constant of the problem."""
    variables = [tensor.clone().requires_grad_() for tensor in point[:6]]
    value = lagrangian(KSVDPoint(*variables, point.lambda_diag), *features, f_x)
    for tensor, gradient in zip(point, torch.autograd.grad(value, variables), strict=False):
        assert_equal(gradient / tensor.norm(), torch.zeros_like(gradient))
    assert_equal(value.detach() * point.lambda_diag[0], torch.zeros((), dtype=torch.float64))


def test_gradient_of_the_lagrangian_is_eq_14_at_any_point(features, f_x):
    phi_q, phi_k = features
    rows = P if f_x is None else len(f_x)
    point = random_point(len(phi_q), len(phi_k), rows)
    variables = [tensor.requires_grad_() for tensor in point[:6]]
    value = lagrangian(KSVDPoint(*variables, point.lambda_diag), phi_q, phi_k, f_x)
    gradients = torch.autograd.grad(value, variables)
    with torch.no_grad():
        weights = weights_from_dual(phi_q, phi_k, point.h_e, point.h_r, f_x)
        h_e, h_r = dual_from_scores(scores_of(point), point.lambda_diag)
        scores = primal_scores(phi_q, phi_k, *weights_given_x(point.w_e, point.w_r, f_x))
        expected = [
            weights.r - point.w_r,
            weights.e - point.w_e,
            h_e - point.h_e,
            h_r - point.h_r,
            scores.e - point.e_scores,
            scores.r - point.r_scores,
        ]
    for gradient, difference in zip(gradients, expected, strict=True):
        assert_equal(gradient, difference)


@pytest.mark.parametrize("num_directions", [0, -1, P + 1])
def test_too_many_directions(num_directions):
    kernel_matrix = induced_kernel_matrix(randn(N, P), randn(T, P, seed=1))
    message = rf"num_directions must be between 1 and {P}.*nonzero.*got {num_directions}"
    with pytest.raises(ValueError, match=message):
        solve_dual(kernel_matrix, num_directions)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: induced_kernel_matrix(randn(N, P), randn(T, P + 1)), r"phi_k .*7.* got \(19, 8\)"),
        (lambda: induced_kernel_matrix(randn(N), randn(T, P)), r"phi_q .* got \(23,\)"),
        (lambda: stationary_point(randn(N, P), randn(T, P), S, randn(P, M)), r"f_x .* \(7, 11\)"),
        (lambda: solve_dual(randn(N), S), r"kernel_matrix .* got \(23,\)"),
        (lambda: solve_dual(randn(0, T), S), r"kernel_matrix .* got \(0, 19\)"),
        (lambda: best_unexplained_energy(randn(P), P + 1), "num_directions .* 7, got 8"),
        (
            lambda: objective_from_dual(randn(N, T), randn(N, S), randn(T, S), torch.zeros(S)),
            r"lambda_diag must be positive, got \[0.0",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
