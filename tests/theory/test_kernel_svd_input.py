import numpy as np
import pytest
import torch

from primal_attention.theory import KernelSVD, NotFittedError

N, T, D, S = 211, 157, 5, 7


def sets():
    rng = np.random.default_rng(0)
    return rng.normal(size=(N, D)), rng.normal(size=(T, D))


def singular_values(X, Z=None):
    return KernelSVD(S, solver="exact").fit(X, Z).singular_values_


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_later_changes_of_the_data_change_nothing():
    X, Z = (torch.tensor(points) for points in sets())
    model = KernelSVD(S).fit(X, Z)
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
        KernelSVD(**{"n_directions": S, **options}).fit(*sets())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, Z: (with_nan(X), Z), "X must be finite"),
        (lambda X, Z: (X, with_nan(Z)), "Z must be finite"),
        (lambda X, Z: (X[0], Z), r"X must have shape .* got \(5,\)"),
        (lambda X, Z: (X[:0], Z), r"X must have shape .* got \(0, 5\)"),
        (lambda X, Z: (X, Z[:, :3]), "Z must have the 5 coordinates of X, got 3"),
        (lambda X, Z: (X.astype(np.float16), Z), "X must be float32 or float64, got .*float16"),
    ],
)
def test_bad_points(change, message):
    with pytest.raises(ValueError, match=message):
        KernelSVD(S).fit(*change(*sets()))


def test_bad_points_of_transform():
    X, Z = sets()
    model = KernelSVD(S).fit(X, Z)
    with pytest.raises(ValueError, match="X must have the 5 coordinates seen by fit, got 4"):
        model.transform(X[:, :4])
    with pytest.raises(ValueError, match="Z must be finite"):
        model.transform(X, with_nan(Z))
    with pytest.raises(ValueError, match=r"no parameters named \['depth'\]"):
        model.set_params(depth=3)
