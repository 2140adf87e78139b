import numpy as np
import pytest
import torch

from primal_attention.theory import KernelSVD, NotFittedError

N, T, D, S = 211, 157, 5, 7


def sets():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)), rng.normal(size=(T, D))


def fit(X, Z, **options):
    return KernelSVD(**{"n_directions": S, **options}).fit(X, Z=Z)


def singular_values(X, Z=None):
    return KernelSVD(S, solver="exact").fit(X, Z=Z).singular_values_


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_later_changes_of_the_data_change_nothing():
    X, Z = (torch.tensor(points) for points in sets())
    model = KernelSVD(S).fit(X, Z=Z)
    new = X[:3].clone()
    before = model.transform(new)
    Z.zero_()
    assert torch.equal(model.transform(new), before)


def test_unusual_arrays_are_accepted():
    X, Z = sets()
    expected = singular_values(X, Z)
    frozen = X.copy()
    frozen.flags.writeable = False
    assert_close(singular_values(frozen, Z.tolist()), expected)
    assert_close(singular_values(X[::-1], np.asfortranarray(Z)), expected)
    assert singular_values(X, torch.tensor(Z, dtype=torch.float32)).dtype == np.float64
    whole = np.arange(N * D).reshape(N, D) % 7
    assert_close(singular_values(whole), singular_values(whole * 1.0))


def test_transform_needs_fit():
    with pytest.raises(NotFittedError, match="not fitted"):
        KernelSVD().transform(sets()[0])
    assert issubclass(NotFittedError, ValueError)


def with_nan(points):
    return np.where(np.arange(D) == 1, np.nan, points)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_directions": 0}, f"n_directions must be an integer, between 1 and {T}, got 0"),
        ({"n_directions": T + 1}, f"n_directions .* between 1 and {T}, got {T + 1}"),
        ({"n_directions": 2.5}, r"n_directions .* got 2.5"),
        ({"n_landmarks": 3, "solver": "nystrom"}, "n_landmarks .* at least 7, got 3"),
        ({"n_iter": -1}, "n_iter .* at least 0, got -1"),
        ({"oversampling": -2}, "oversampling .* got -2"),
        ({"block_size": 0}, "block_size .* at least 1, got 0"),
        ({"random_state": "x"}, "random_state .* got 'x'"),
        ({"solver": "lanczos"}, "solver must be one of .* got 'lanczos'"),
        ({"kernel": "laplace"}, "kernel must be one of .* got 'laplace'"),
        ({"kernel": 3}, "kernel must be one of .* got 3"),
        ({"kernel": lambda X, Z: X}, r"kernel must return .* \(211, 157\), got \(211, 5\)"),
        ({"kernel": lambda X, Z: np.full((len(X), len(Z)), np.nan)}, "kernel .* finite"),
    ],
)
def test_bad_parameters(options, message):
    with pytest.raises(ValueError, match=message):
        fit(*sets(), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, Z: (with_nan(X), Z), "X must be finite"),
        (lambda X, Z: (X, with_nan(Z)), "Z must be finite"),
        (lambda X, Z: (X[0], Z), r"X must have shape .* got \(5,\)"),
        (lambda X, Z: (X[:0], Z), r"X must not be empty, got 0 sample.s. \(shape=\(0, 5\)\)"),
        (lambda X, Z: (X, Z[:, :0]), r"Z must not be empty, got 0 feature.s. \(shape=\(157, 0\)\)"),
        (lambda X, Z: (X + 1j, Z), "X must be real, got .*complex128"),
        (lambda X, Z: (X, torch.tensor(Z) * 1j), "Z must be real, got .*complex128"),
        (
            lambda X, Z: (X.astype(str).astype(object) + "m", Z),
            "X must hold numbers, got object: could not",
        ),
        (lambda X, Z: (X, Z[:, :3]), "Z must have the 5 coordinates of X, got 3"),
        (lambda X, Z: (X.astype(np.float16), Z), "X must be float32 or float64, got .*float16"),
    ],
)
def test_bad_points(change, message):
    with pytest.raises(ValueError, match=message):
        fit(*change(*sets()))


def test_bad_points_of_transform():
    X, Z = sets()
    model = KernelSVD(S).fit(X, Z=Z)
    with pytest.raises(ValueError, match="X has 4 features, but KernelSVD is expecting 5"):
        model.transform(X[:, :4])
    with pytest.raises(ValueError, match="Z must be finite"):
        model.transform(X, Z=with_nan(Z))
    with pytest.raises(ValueError, match="X must be real"):
        model.transform(X * 1j)
    with pytest.raises(ValueError, match=r"no parameters named \['depth'\]"):
        model.set_params(depth=3)


def test_numbers_as_objects_are_numbers():
    X, Z = sets()
    assert_close(singular_values(X.astype(object), Z), singular_values(X, Z))


def test_sparse_points_are_refused_by_name():
    sparse = pytest.importorskip("scipy.sparse")
    for points in (sparse.csr_matrix(sets()[0]), sparse.coo_array(sets()[0])):
        with pytest.raises(TypeError, match=r"X must be dense, got a sparse .* X.toarray"):
            KernelSVD(S).fit(points)


def test_targets_are_ignored():
    X, Z = sets()
    for y in (X[:, 0] > 0, X, np.zeros((N, 2))):
        assert_close(KernelSVD(S).fit(X, y).singular_values_, singular_values(X))
        found = KernelSVD(S).fit_transform(X, y, Z=Z)[1]
        assert_close(found, KernelSVD(S).fit(X, Z=Z).transform(X, Z=Z)[1])
    with pytest.raises(TypeError, match="positional"):
        KernelSVD(S).fit(X, None, Z)


def test_it_prints_its_parameters_and_names_its_scores():
    model = KernelSVD(2, kernel="cosine", n_iter=6)
    assert repr(model) == "KernelSVD(n_directions=2, kernel='cosine')"
    with pytest.raises(ValueError, match="not fitted yet"):
        model.get_feature_names_out()
    assert list(model.fit(sets()[0]).get_feature_names_out()) == ["kernelsvd0", "kernelsvd1"]


def test_in_a_pipeline_with_a_classifier_and_a_grid():
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    X = sets()[0]
    y = np.where(X[:, 0] > 0, "right", "left")
    pipeline = make_pipeline(KernelSVD(2), linear_model.LogisticRegression(C=1e4))
    grid = GridSearchCV(pipeline, {"kernelsvd__n_directions": [1, 20]}, cv=3).fit(X, y)
    assert grid.best_params_ == {"kernelsvd__n_directions": 20}
    assert grid.score(X, y) > 0.85
    assert grid.best_estimator_[0].n_features_in_ == D


@pytest.mark.filterwarnings("ignore")  # checks warn of what they do
@pytest.mark.parametrize("solver", ["exact", "randomized", "nystrom"])
def test_conventions_of_scikit_learn(solver):
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    model = KernelSVD(2, solver=solver, random_state=0)
    found = checks.check_estimator(model, on_fail=None, on_skip=None)
    assert len(found) > 40
    assert not [one for one in found if one["status"] not in ("passed", "skipped")]
    skipped = {one["check_name"] for one in found if one["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # runs where SCIPY_ARRAY_API is set alone
