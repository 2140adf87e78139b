import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

from primal_attention.theory import RBF, KernelSVD, kernel_svd

N, T, D, S = 211, 157, 5, 7
STREAMED = {"n_landmarks": 101, "n_iter": 12, "oversampling": 23, "block_size": 37}
SOLVERS = ["exact", "randomized", "nystrom"]


def sets(dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(N, D)).astype(dtype), rng.normal(size=(T, D)).astype(dtype) + 0.5


def attention_scores(X, Z, scale=0.3):
    """Asymmetric even where X is Z; for arrays of either kind."""
    return (scale * X[:, [1, 2, 3, 4, 0]] @ Z.T) ** 2 + X[:, :1]


def fitted(solver, X, Z=None, kernel="rbf", **options):
    options = {**STREAMED, "random_state": 3, "solver": solver, "kernel": kernel, **options}
    return KernelSVD(S, **options).fit(X, Z=Z)


def assert_close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=SOLVERS)
def solver(request):
    return request.param


@pytest.mark.parametrize("kernel", ["rbf", "cosine", "exponential", "polynomial"])
def test_named_kernels_agree_with_numpy(solver, kernel):
    X, Z = sets()
    kernel_matrix = kernel_svd.KERNELS[kernel]()(torch.tensor(X), torch.tensor(Z)).numpy()
    num_directions = min(S, np.linalg.matrix_rank(kernel_matrix))
    model = fitted(solver, X, Z, kernel).set_params(n_directions=num_directions).fit(X, Z=Z)
    left, singular_values, right_t = np.linalg.svd(kernel_matrix, full_matrices=False)
    assert_close(model.singular_values_, singular_values[:num_directions])
    found = model.left_vectors_ * model.singular_values_ @ model.right_vectors_.T
    best = left[:, :num_directions] * singular_values[:num_directions] @ right_t[:num_directions]
    assert_close(found, best, tolerance=1e-4)


def test_asymmetric_function_on_one_set(solver):
    X, _ = sets()
    kernel_matrix = attention_scores(X, X)
    assert not np.allclose(kernel_matrix, kernel_matrix.T)
    model = fitted(solver, X, kernel=attention_scores)
    assert_close(model.singular_values_, np.linalg.svd(kernel_matrix, compute_uv=False)[:S])
    assert_close(kernel_matrix @ model.right_vectors_, model.left_vectors_ * model.singular_values_)


def test_vectors_are_orthonormal_with_fixed_signs(solver):
    model = fitted(solver, *sets())
    for vectors in (model.left_vectors_, model.right_vectors_):
        assert_close(vectors.T @ vectors, np.eye(S), tolerance=1e-10)
    largest = np.abs(model.left_vectors_).argmax(axis=0)
    assert (model.left_vectors_[largest, range(S)] > 0).all()
    assert (np.diff(model.singular_values_) <= 0).all()


def test_solvers_agree_on_the_signs():
    X, Z = sets()
    exact = fitted("exact", X, Z)
    for other in ("randomized", "nystrom"):
        assert_close(fitted(other, X, Z).left_vectors_, exact.left_vectors_, tolerance=1e-4)
        assert_close(fitted(other, X, Z).right_vectors_, exact.right_vectors_, tolerance=1e-4)


def test_scores_of_the_training_points_are_the_scaled_vectors(solver):
    X, Z = sets()
    model = fitted(solver, X, Z)
    e_scores, r_scores = model.transform(X, Z=Z)
    assert_close(e_scores, model.left_vectors_ * model.singular_values_, tolerance=1e-5)
    assert_close(r_scores, model.right_vectors_ * model.singular_values_, tolerance=1e-5)


def test_scores_of_new_points_follow_eq_8(solver):
    (X, Z), (new_X, new_Z) = sets(), sets(seed=1)
    model = fitted(solver, X, Z, RBF(0.2))
    e_scores, r_scores = model.transform(new_X[:13], Z=new_Z[:11])
    kernel = RBF(0.2)
    kernel_of_queries = kernel(torch.tensor(new_X[:13]), torch.tensor(Z)).numpy()
    kernel_of_keys = kernel(torch.tensor(X), torch.tensor(new_Z[:11])).numpy()
    assert_close(e_scores, kernel_of_queries @ model.right_vectors_, tolerance=1e-12)
    assert_close(r_scores, kernel_of_keys.T @ model.left_vectors_, tolerance=1e-12)
    assert_close(model.transform(new_X[:13]), e_scores, tolerance=0)


def test_fit_transform_is_fit_then_transform():
    X, Z = sets()
    model = KernelSVD(S, random_state=0)
    assert_close(model.fit_transform(X), KernelSVD(S).fit(X).transform(X), tolerance=1e-12)
    assert_close(model.fit_transform(X, Z=Z)[1], KernelSVD(S).fit(X, Z=Z).transform(X, Z=Z)[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numpy_in_numpy_out_and_torch_in_torch_out(solver, dtype):
    X, Z = sets(dtype)
    model = fitted(solver, X, Z)
    results = [model.singular_values_, model.left_vectors_, *model.transform(X, Z=Z)]
    assert all(isinstance(result, np.ndarray) and result.dtype == dtype for result in results)
    tensors = torch.tensor(X), torch.tensor(Z)
    torch_model = fitted(solver, *tensors)
    torch_results = [
        torch_model.singular_values_,
        torch_model.left_vectors_,
        *torch_model.transform(tensors[0], Z=tensors[1]),
    ]
    for result, expected in zip(torch_results, results, strict=True):
        assert isinstance(result, torch.Tensor)
        assert_close(result.numpy(), expected, tolerance=1e-3 if dtype == np.float32 else 1e-10)
    assert isinstance(torch_model.transform(X), np.ndarray)


@pytest.mark.parametrize("solver", ["randomized", "nystrom"])
def test_float32_reaches_small_singular_values(solver):
    X, Z = sets()
    exact = fitted("exact", X, Z, RBF(0.02))
    assert exact.singular_values_[-1] < 2e-2 * exact.singular_values_[0]
    single = fitted(solver, X.astype(np.float32), Z.astype(np.float32), RBF(0.02))
    assert_close(single.singular_values_ / exact.singular_values_, np.ones(S), tolerance=1e-4)


def test_functions_are_given_arrays_of_the_kind_given_to_fit(solver):
    X, Z = sets()
    kinds = set()

    def kernel(X, Z):
        kinds.add(type(X))
        return attention_scores(X, Z)

    fitted(solver, X, Z, kernel)
    assert kinds == {np.ndarray}
    fitted(solver, torch.tensor(X), torch.tensor(Z), kernel)
    assert kinds == {np.ndarray, torch.Tensor}


@pytest.mark.parametrize("solver", ["randomized", "nystrom"])
def test_only_blocks_of_the_matrix_are_formed(solver):
    X, Z = sets()
    entries = []

    def kernel(X, Z):
        entries.append(len(X) * len(Z))
        return attention_scores(X, Z)

    fitted(solver, X, Z, kernel, n_landmarks=S, block_size=11).transform(X, Z=Z)
    assert max(entries) == 11 * T


@pytest.mark.parametrize("solver", ["randomized", "nystrom"])
def test_block_size_changes_nothing(solver):
    X, Z = sets()
    expected = fitted(solver, X, Z).singular_values_
    for block_size in (1, 100, N, 10 * N):
        found = fitted(solver, X, Z, block_size=block_size).singular_values_
        assert_close(found, expected, tolerance=1e-12)


def test_plain_nystrom_is_the_decomposition_of_the_landmarks_extended():
    X, Z = sets()
    exact, plain = fitted("exact", X, Z), fitted("nystrom", X, Z, n_iter=0)
    error = np.abs(plain.singular_values_ / exact.singular_values_ - 1).max()
    assert 1e-3 < error < 0.25
    assert_close(np.linalg.norm(plain.left_vectors_, axis=0), np.ones(S), tolerance=1e-12)
    everything = fitted("nystrom", X, Z, n_iter=0, n_landmarks=10 * N)
    assert_close(everything.singular_values_, exact.singular_values_, tolerance=1e-10)
    assert_close(everything.left_vectors_, exact.left_vectors_, tolerance=1e-8)
    assert_close(everything.right_vectors_, exact.right_vectors_, tolerance=1e-8)


def test_default_refinement_is_within_one_percent():
    X, Z = sets()
    exact = fitted("exact", X, Z, RBF(0.5))
    refined = KernelSVD(S, kernel=RBF(0.5), solver="nystrom", n_landmarks=31, random_state=0)
    error = np.abs(refined.fit(X, Z=Z).singular_values_ / exact.singular_values_ - 1).max()
    assert error < 0.01


@pytest.mark.parametrize("solver", ["randomized", "nystrom"])
def test_random_state(solver):
    X, Z = sets()
    options = {"n_iter": 1, "oversampling": 1}
    first, same = (fitted(solver, X, Z, **options).left_vectors_ for _ in range(2))
    other = fitted(solver, X, Z, random_state=4, **options).left_vectors_
    unseeded = [fitted(solver, X, Z, random_state=None, **options).left_vectors_ for _ in range(2)]
    assert np.array_equal(first, same)
    assert not np.allclose(first, other)
    assert not np.allclose(*unseeded)


def test_the_global_random_state_is_left_alone(solver):
    before = torch.get_rng_state()
    fitted(solver, *sets(), random_state=None)
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_is_exact_for_small_matrices_only(monkeypatch):
    X, Z = sets()
    assert fitted("auto", X, Z).solver_ == "exact"
    monkeypatch.setattr(kernel_svd, "EXACT_ENTRIES", N * T - 1)
    assert fitted("auto", X, Z).solver_ == "nystrom"


def test_scikit_learn_clones_it():
    kernel = RBF(0.5)
    model = fitted("nystrom", *sets(), kernel)
    copy = clone(model)
    assert copy is not model
    assert copy.get_params() == model.get_params()
    assert copy.kernel == kernel
    assert not hasattr(copy, "singular_values_")
    assert copy.set_params(n_directions=3, solver="exact") is copy
    assert copy.fit(*sets()).singular_values_.shape == (3,)


def test_kernel_params():
    X, Z = sets()
    named = fitted("exact", X, Z, "rbf", kernel_params={"gamma": 0.7})
    assert_close(named.singular_values_, fitted("exact", X, Z, RBF(0.7)).singular_values_)
    function = fitted("exact", X, Z, attention_scores, kernel_params={"scale": 2.0})
    expected = np.linalg.svd(attention_scores(X, Z, 2.0), compute_uv=False)[:S]
    assert_close(function.singular_values_, expected)


def test_the_sets_may_have_different_coordinates():
    X, Z = sets()
    model = fitted("nystrom", X, Z[:, :2], lambda X, Z: np.cos(X[:, :2] @ Z.T))
    e_scores, r_scores = model.transform(X[:3], Z=Z[:2, :2])
    assert e_scores.shape == (3, S)
    assert r_scores.shape == (2, S)
    assert model.n_features_in_ == D


@settings(max_examples=25, deadline=None)
@given(
    num_queries=st.integers(1, 9),
    num_keys=st.integers(1, 9),
    num_directions=st.integers(1, 9),
    solver=st.sampled_from(SOLVERS),
    block_size=st.integers(1, 4),
)
def test_tiny_matrices(num_queries, num_keys, num_directions, solver, block_size):
    X, Z = sets()
    X, Z = X[:num_queries], Z[:num_keys]
    num_directions = min(num_directions, num_queries, num_keys)
    model = KernelSVD(num_directions, solver=solver, block_size=block_size, random_state=0)
    model.fit(X, Z=Z)
    expected = np.linalg.svd(RBF()(torch.tensor(X), torch.tensor(Z)).numpy(), compute_uv=False)
    assert_close(model.singular_values_, expected[:num_directions], tolerance=1e-9)


def test_constant_kernel_has_one_direction(solver):
    X, Z = sets()
    model = fitted(solver, X, Z, lambda X, Z: np.ones((len(X), len(Z))))
    assert_close(model.singular_values_, [np.sqrt(N * T)] + [0] * (S - 1), tolerance=1e-9)
    assert_close(model.transform(X)[:, 1:], np.zeros((N, S - 1)), tolerance=1e-9)
