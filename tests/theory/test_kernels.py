import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import pairwise

from primal_attention.theory import KERNELS, RBF, Cosine, Exponential, Polynomial

N, T, D = 23, 17, 5
KERNEL_VALUES = [
    Cosine(),
    Exponential(),
    Exponential(scale=0.3),
    RBF(),
    RBF(gamma=0.7),
    Polynomial(),
    Polynomial(degree=2, gamma=0.4, coef0=0.0),
    Polynomial(degree=1, gamma=2.0, coef0=3.0),
]
WITH_FEATURES = [kernel for kernel in KERNEL_VALUES if isinstance(kernel, Cosine | Polynomial)]


def points(count=N, dim=D, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("kernel", "known"),
    [
        (Cosine(), pairwise.cosine_similarity),
        (RBF(), pairwise.rbf_kernel),
        (RBF(gamma=0.7), lambda X, Z: pairwise.rbf_kernel(X, Z, gamma=0.7)),
        (Polynomial(), pairwise.polynomial_kernel),
        (Polynomial(2, 0.4, 0.0), lambda X, Z: pairwise.polynomial_kernel(X, Z, 2, 0.4, 0.0)),
    ],
    ids=["cosine", "rbf", "rbf-gamma", "polynomial", "polynomial-homogeneous"],
)
def test_kernels_equal_those_of_scikit_learn(kernel, known):
    X, Z = points(), points(T, seed=1)
    expected = torch.tensor(known(X.numpy(), Z.numpy()))
    torch.testing.assert_close(kernel(X, Z), expected, rtol=1e-12, atol=1e-12)


def test_exponential_scale():
    X, Z = points(), points(T, seed=1)
    torch.testing.assert_close(Exponential(0.3)(X, Z), (0.3 * X @ Z.T).exp())
    torch.testing.assert_close(Exponential()(X, Z), (X @ Z.T / math.sqrt(D)).exp())


@pytest.mark.parametrize("kernel", KERNEL_VALUES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_and_dtype(kernel, dtype):
    values = kernel(points(dtype=dtype), points(T, seed=1, dtype=dtype))
    assert values.shape == (N, T)
    assert values.dtype == dtype


@pytest.mark.parametrize("kernel", KERNEL_VALUES, ids=str)
def test_gradients(kernel):
    inputs = [points(3, 2).requires_grad_(), points(7, 2, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(kernel, inputs)


@pytest.mark.parametrize("kernel", WITH_FEATURES, ids=str)
def test_features_span_the_kernel(kernel):
    X, Z = points(), points(T, seed=1)
    torch.testing.assert_close(
        kernel.features(X) @ kernel.features(Z).T, kernel(X, Z), rtol=1e-12, atol=1e-12
    )


@given(
    dim=st.integers(1, 4),
    degree=st.integers(1, 4),
    gamma=st.floats(0.1, 3),
    coef0=st.sampled_from([0.0, 0.25, 2.0]),
    seed=st.integers(0, 10),
)
def test_polynomial_features_for_any_degree(dim, degree, gamma, coef0, seed):
    kernel = Polynomial(degree, gamma, coef0)
    X, Z = points(3, dim, seed), points(2, dim, seed + 1)
    phi = kernel.features(X)
    assert phi.shape[1] == math.comb(dim + (coef0 > 0) + degree - 1, degree)
    torch.testing.assert_close(phi @ kernel.features(Z).T, kernel(X, Z), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kernel", [Exponential(), RBF()], ids=str)
def test_no_finite_feature_map(kernel):
    with pytest.raises(ValueError, match=rf"{type(kernel).__name__}.*no finite feature map"):
        kernel.features(points())


def test_cosine_of_zero_rows_is_zero_with_zero_gradient():
    X = points(3)
    X[1] = 0
    X.requires_grad_()
    phi = Cosine().features(X)
    assert torch.equal(phi[1], torch.zeros(D, dtype=X.dtype))
    (gradient,) = torch.autograd.grad(phi.sum(), X)
    assert torch.equal(gradient[1], torch.zeros(D, dtype=X.dtype))
    assert gradient[0].abs().max() > 0


@given(st.integers(-300, 300))
def test_cosine_does_not_see_the_length(exponent):
    X = points(3)
    torch.testing.assert_close(Cosine().features(X * 10.0**exponent), Cosine().features(X))


@given(shift=st.floats(-1e6, 1e6))
def test_rbf_does_not_see_a_shift(shift):
    X, Z = points(3), points(2, seed=1)
    torch.testing.assert_close(RBF()(X + shift, Z + shift), RBF()(X, Z), rtol=1e-6, atol=1e-6)


def test_rbf_is_at_most_one():
    X = points(dtype=torch.float32) * 100
    assert RBF()(X, X).max() <= 1
    torch.testing.assert_close(RBF(1e-4)(X, X).diagonal(), torch.ones(N), atol=1e-4, rtol=0)


def test_registry_builds_every_kernel_by_name():
    assert set(KERNELS) == {"cosine", "exponential", "rbf", "polynomial"}
    assert KERNELS["polynomial"](degree=2) == Polynomial(degree=2)
    assert hash(KERNELS["rbf"]()) == hash(RBF())


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RBF(gamma=0), "gamma must be positive and finite, got 0"),
        (lambda: RBF(gamma=math.nan), "gamma .* got nan"),
        (lambda: Exponential(scale=-1.0), "scale .* got -1.0"),
        (lambda: Polynomial(degree=0), "degree .* got 0"),
        (lambda: Polynomial(degree=1.5), "degree .* got 1.5"),
        (lambda: Polynomial(gamma=math.inf), "gamma .* got inf"),
        (lambda: Polynomial(coef0=-2.0), "coef0 .* got -2.0"),
        (lambda: RBF()(points(), points(T, D + 1)), "Z must have the 5 coordinates of X, got 6"),
        (lambda: Cosine()(points()[0], points()), r"X must have shape .* got \(5,\)"),
    ],
)
def test_bad_values(build, message):
    with pytest.raises(ValueError, match=message):
        build()
