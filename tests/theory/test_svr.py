"""Attention is a support vector regression: the claims of docs/svr.md about one head."""

import math

import pytest
import torch
from torch.nn import functional as F

from primal_attention.attention.baselines.linear import LinearAttention
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.attention.svr.mechanisms import (
    LinearBNAttention,
    SoftmaxBNAttention,
    SoftmaxBNSHAttention,
    SoftmaxSHAttention,
)
from primal_attention.theory import RBF, Exponential, svr
from primal_attention.theory.svr import Head

N, T, D, V = 17, 23, 4, 3


def randn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_head(seed=0, dim=D):
    return Head(randn(N, dim, seed=seed), randn(T, dim, seed=seed + 1), randn(T, V, seed=seed + 2))


def assert_close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# The regression


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_an_independent_solver_finds_the_attention_at_unseen_queries(epsilon, seed):
    head = make_head(seed)
    problem = svr.implied_regression(head.keys, head.values, epsilon=epsilon)
    dual = problem.solve()
    assert_close(dual, svr.dual_variables(head.keys, head.values), 1e-8)
    normaliser = Exponential()(head.keys, head.keys).sum(1, keepdim=True)
    found = head._replace(values=dual / normaliser)
    expected = F.scaled_dot_product_attention(*(z[None] for z in head))[0]
    assert_close(svr.softmax_attention(found), expected, 1e-8)


def test_primal_and_dual_have_no_gap_at_the_solution():
    problem = svr.implied_regression(*make_head()[1:], epsilon=0.05)
    dual = problem.solve()
    assert_close(problem.primal_value(dual), problem.dual_value(dual), 1e-11)
    other = dual + 0.1 * randn(T, V, seed=9)
    assert problem.primal_value(other) > problem.dual_value(dual) + 1e-3
    assert problem.dual_value(other) < problem.dual_value(dual) - 1e-3


def test_solution_keeps_the_kkt_conditions_where_the_box_is_tight():
    head, epsilon = make_head(), 0.1
    box = 0.3 * float(svr.effective_box(head.keys, head.values))
    problem = svr.implied_regression(head.keys, head.values, epsilon=epsilon, box=box)
    dual = problem.solve()
    residual = problem.targets - problem.kernel_matrix @ dual
    inside, outside = (dual != 0) & (dual.abs() < box), dual.abs() == box
    assert inside.any() and outside.any() and (dual == 0).any()
    assert_close(residual[inside], epsilon * dual[inside].sign(), 1e-9)
    assert (residual[outside] * dual[outside].sign() >= epsilon - 1e-9).all()
    assert (residual[dual == 0].abs() <= epsilon + 1e-9).all()
    assert abs(problem.primal_value(dual) - problem.dual_value(dual)) < 1e-7


def test_any_box_above_the_effective_one_has_the_same_solution():
    _, keys, values = make_head()
    least = float(svr.effective_box(keys, values))
    one, other, below = (
        svr.implied_regression(keys, values, epsilon=0.05, box=factor * least).solve()
        for factor in (1.001, 100.0, 0.5)
    )
    assert_close(one, other, 1e-8)
    assert (below - one).abs().max() > 0.1


def test_primal_value_of_weights_is_that_of_their_dual_variables():
    head = make_head()
    phi_k = svr.elu_features(head.keys)
    kernel_matrix = phi_k @ phi_k.T
    normaliser = kernel_matrix.sum(1, keepdim=True)
    problem = svr.SVR(
        kernel_matrix / (normaliser * normaliser.T), randn(T, V, seed=5), epsilon=0.1, box=3.0
    )
    dual = randn(T, V, seed=6)
    weights = svr.primal_weights(phi_k, dual / normaliser)
    value = svr.primal_value(weights, phi_k / normaliser, problem.targets, epsilon=0.1, box=3.0)
    assert_close(problem.primal_value(dual), value)
    assert value > problem.dual_value(problem.solve(tolerance=1e-6))  # weak duality


# Features, primal and dual form


@pytest.mark.parametrize(
    ("degree", "features", "bound"),
    [(2, 15, 3e-2), (4, 70, 4e-4), (8, 495, 1e-8), (12, 1820, 1e-13)],
)
def test_taylor_features_approach_the_exponential_kernel(degree, features, bound):
    X, Z = (randn(count, D, seed=count).clamp(-0.5, 0.5) for count in (N, T))
    phi_x, phi_z = svr.taylor_features(X, degree), svr.taylor_features(Z, degree)
    assert phi_x.shape == (N, features)
    inner = X @ Z.T / math.sqrt(D)
    series = sum(inner**power / math.factorial(power) for power in range(degree + 1))
    assert_close(phi_x @ phi_z.T, series, 1e-12)
    assert (phi_x @ phi_z.T - Exponential()(X, Z)).abs().max() < bound


@pytest.mark.parametrize(
    ("features", "tolerance"),
    [(svr.elu_features, 1e-12), (lambda X: svr.taylor_features(X, 6), 1e-12)],
    ids=["elu", "taylor"],
)
def test_primal_layer_equals_the_expansion(features, tolerance):
    head = make_head()
    phi_q, phi_k = features(head.queries), features(head.keys)
    weights = svr.primal_weights(phi_k, head.values)
    primal = svr.primal_layer(phi_q, weights, phi_q @ phi_k.sum(0))
    assert_close(primal, svr.linear_attention(head, features), tolerance)


def test_the_primal_layer_of_softmax_attention_has_taylor_features():
    head = Head(*(z.clamp(-0.5, 0.5) for z in make_head()))
    phi_q, phi_k = (svr.taylor_features(z, 12) for z in head[:2])
    primal = svr.primal_layer(phi_q, svr.primal_weights(phi_k, head.values), phi_q @ phi_k.sum(0))
    assert_close(primal, svr.softmax_attention(head), 1e-12)
    assert_close(
        svr.primal_weights(phi_k, head.values).square().sum(),
        svr.flatness(head.keys, head.values),
        1e-12,
    )


def test_without_normaliser_the_primal_layer_is_fully_connected():
    x, weights, bias = randn(N, D), randn(V, D, seed=1), randn(V, seed=2)
    assert_close(svr.primal_layer(x, weights, bias=bias), F.linear(x, weights, bias), 1e-14)
    head = make_head()
    weights = svr.primal_weights(head.keys, head.values)
    assert_close(svr.fast_weights(head), svr.primal_layer(head.queries, weights), 1e-12)


# What choice of kernel, normaliser and training set gives what


def heads_of(layer, x):
    """Queries, keys and values of each head for one sequence [N, D]."""
    q, k, v = (
        projection(x).unflatten(-1, (layer.num_heads, -1)).unbind(-2)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    return [Head(*one) for one in zip(q, k, v, strict=True)]


def out_of(layer, outputs):
    out_maps = layer.out_proj.weight.chunk(layer.num_heads, dim=1)
    return svr.multi_head(outputs, out_maps) + layer.out_proj.bias


CASES = {
    "softmax": (SoftmaxAttention, {}, lambda head, h: svr.softmax_attention(head)),
    "linear": (LinearAttention, {}, lambda head, h: svr.linear_attention(head)),
    "softmax_bn": (
        SoftmaxBNAttention,
        {"beta": 0.7},
        lambda head, h: svr.softmax_attention(svr.batch_norm(head, beta=0.7)),
    ),
    "linear_bn": (
        LinearBNAttention,
        {},
        lambda head, h: svr.linear_attention(svr.batch_norm(head)),
    ),
    "softmax_sh": (
        SoftmaxSHAttention,
        {"scales": [1, 2, 4]},
        lambda head, h: svr.softmax_attention(svr.average_pool(head, 2**h)),
    ),
    "softmax_bn_sh": (
        SoftmaxBNSHAttention,
        {"scales": [1, 2, 4]},
        lambda head, h: svr.softmax_attention(svr.batch_norm(svr.average_pool(head, 2**h))),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_multi_head_regressions(case):
    build, options, attention = CASES[case]
    torch.manual_seed(0)
    layer = build(15, 3, **options).double()
    x = randn(T, 15)
    outputs = [attention(head, h) for h, head in enumerate(heads_of(layer, x))]
    assert_close(out_of(layer, outputs), layer(x[None])[0], 1e-12)


def test_causal_and_local_attention_have_a_training_set_for_each_query():
    q, k, v = randn(T, D), randn(T, D, seed=1), randn(T, V, seed=2)
    head = Head(q, k, v)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    for support in (distance >= 0, distance.abs() <= 3, (distance % 5 == 0) & (distance >= 0)):
        expected = F.scaled_dot_product_attention(q[None], k[None], v[None], support[None])[0]
        assert_close(svr.softmax_attention(head, support), expected, 1e-12)
    nothing = torch.zeros(T, T, dtype=torch.bool)
    assert_close(svr.softmax_attention(head, nothing), torch.zeros_like(v), 0.0)


def test_a_translation_invariant_kernel_gives_kernel_regression():
    head = make_head()
    weights = (-0.4 * torch.cdist(head.queries, head.keys).square()).softmax(-1)
    expansion = svr.support_vector_expansion(*head, RBF(gamma=0.4))
    assert_close(expansion, weights @ head.values, 1e-12)


# Analysis of a softmax head


def test_analysis_of_a_head():
    _, keys, values = make_head()
    values = values.clone()
    values[::2] = 0
    share = (T - len(values[::2])) / T
    assert svr.support_fraction(keys, values) == pytest.approx(share)
    assert svr.support_fraction(keys, values, threshold=0.99) == pytest.approx(1 / T)
    targets = svr.implied_targets(keys, values, epsilon=0.2)
    fitted = svr.softmax_attention(Head(keys, keys, values))
    assert_close(targets - fitted, 0.2 * values.sign(), 1e-12)
    gram = (keys @ keys.T / math.sqrt(D)).exp()
    assert_close(svr.flatness(keys, values), torch.einsum("id,jd,ij->", values, values, gram))
    assert_close(svr.dual_variables(keys, values), gram.sum(1, keepdim=True) * values)


def test_bad_values_are_named():
    _, keys, values = make_head()
    with pytest.raises(ValueError, match=r"threshold .* got 1\.5"):
        svr.support_fraction(keys, values, threshold=1.5)
    with pytest.raises(ValueError, match=r"degree .* got -1"):
        svr.taylor_features(keys, -1)
    with pytest.raises(ValueError, match=r"epsilon .* got -0\.1"):
        svr.implied_regression(keys, values, epsilon=-0.1)
    with pytest.raises(ValueError, match=r"box .* got 0\.0"):
        svr.implied_regression(keys, values, box=0.0)
    with pytest.raises(RuntimeError, match="1 sweeps"):
        svr.implied_regression(keys, values).solve(max_sweeps=1)
