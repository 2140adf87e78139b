"""Weights, centring, given matrices, energies and data frames of KernelSVD."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from primal_attention import KernelSVD
from primal_attention.theory import RBF

SOLVERS = ["exact", "randomized", "nystrom"]


@pytest.fixture
def points():
    generator = torch.Generator().manual_seed(0)
    draw = {"generator": generator, "dtype": torch.float64}
    return torch.randn(37, 3, **draw), torch.randn(29, 3, **draw)


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(1)
    v = torch.rand(37, generator=generator, dtype=torch.float64)
    w = torch.rand(29, generator=generator, dtype=torch.float64)
    v[3] = w[5] = 0.0
    return v, w


def model(solver="exact", **options):
    options = {"kernel": "rbf", "random_state": 0, "n_iter": 40} | options
    return KernelSVD(4, solver=solver, **options)


def dense(points, weights=None, center=False):
    """The weighted, centred matrix and its shares of the points, all spelled out."""
    X, Z = points
    v, w = weights or (torch.ones(len(X)).double(), torch.ones(len(Z)).double())
    K = RBF()(X, Z)
    if center:
        K = K - (v / v.sum()) @ K
        K = K - (K @ (w / w.sum()))[:, None]
    return v.sqrt()[:, None] * K * w.sqrt(), v, w


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_singular_triplets(points, weights, solver, center, weighted):
    chosen = weights if weighted else None
    K, v, w = dense(points, chosen, center)
    options = {"sample_weight": weights[0], "z_weight": weights[1]} if weighted else {}
    found = model(solver, center=center, block_size=10).fit(points[0], Z=points[1], **options)
    left, right = found.left_vectors_, found.right_vectors_
    values = torch.linalg.svdvals(K)
    torch.testing.assert_close(found.singular_values_, values[:4], rtol=1e-8, atol=0)
    energy = values[:4].square() / values.square().sum()
    torch.testing.assert_close(found.explained_energy_ratio_, energy)
    own = v.sqrt()[:, None] * left, w.sqrt()[:, None] * right
    torch.testing.assert_close(K @ own[1], own[0] * found.singular_values_, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(K.T @ own[0], own[1] * found.singular_values_, rtol=1e-6, atol=1e-6)
    e, r = found.transform(points[0], Z=points[1])
    real = (v > 0, w > 0)
    torch.testing.assert_close(
        e[real[0]], (left * found.singular_values_)[real[0]], atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        r[real[1]], (right * found.singular_values_)[real[1]], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("center", [False, True])
def test_weights_count_copies(points, center):
    X, Z = points
    times = torch.arange(37) % 3
    once = model(center=center).fit(X, Z=Z, sample_weight=times)
    copies = model(center=center).fit(X.repeat_interleave(times, 0), Z=Z)
    torch.testing.assert_close(once.transform(X), copies.transform(X), atol=1e-9, rtol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_given_matrix_is_the_kernel(points, solver):
    X, Z = points
    kernel, new = RBF(), torch.randn(5, 3, dtype=torch.float64)
    by_name = model(solver).fit(X, Z=Z)
    given = model(solver, kernel="precomputed").fit(kernel(X, Z))
    expected = by_name.transform(new, Z=new)
    found = given.transform(kernel(new, Z), Z=kernel(new, X))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match="takes no Z"):
        given.fit(kernel(X, Z), Z=Z)


def test_gamma_follows_the_points(points):
    X, _ = points
    scale = 1 / (3 * X.var(correction=0))
    named = KernelSVD(2, kernel_params={"gamma": "scale"}).fit(X)
    number = KernelSVD(2, kernel_params={"gamma": float(scale)}).fit(X)
    torch.testing.assert_close(named.singular_values_, number.singular_values_)
    distances = torch.pdist(X).square()
    median = KernelSVD(2, kernel_params={"gamma": "median"}).fit(X)
    near = KernelSVD(2, kernel_params={"gamma": float(1 / distances.median())}).fit(X)
    torch.testing.assert_close(median.singular_values_, near.singular_values_, rtol=1e-2, atol=0)
    with pytest.raises(ValueError, match="'median' or 'scale', got 'auto'"):
        KernelSVD(2, kernel_params={"gamma": "auto"}).fit(X)


def test_small_data_has_fewer_directions(points):
    assert len(KernelSVD().fit(points[0][:7]).singular_values_) == 7
    with pytest.raises(ValueError, match="between 1 and 7, got 8 of 7"):
        KernelSVD(8).fit(points[0][:7])


def test_a_frame_of_scores(points):
    X = pd.DataFrame(points[0].numpy(), index=[f"case{i}" for i in range(37)])
    X.columns = ["a", "b", "c"]
    frame = model().set_output(transform="pandas").fit_transform(X)
    assert list(frame.columns) == [f"kernelsvd{s}" for s in range(4)]
    assert list(frame.index) == list(X.index)
    np.testing.assert_allclose(frame, model().fit_transform(points[0].numpy()))
    with pytest.raises(ValueError, match="'default' or 'pandas', got 'polars'"):
        model().set_output(transform="polars")


def test_a_pipeline_with_weights_and_a_classifier(points):
    X = points[0].numpy()
    y = (X[:, 0] > 0).astype(int)
    pipeline = make_pipeline(model(center=True), LogisticRegression())
    pipeline.fit(X, y, kernelsvd__sample_weight=np.ones(37))
    assert pipeline.score(X, y) > 0.9


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(5), r"shape \(37,\), got \(5,\)"),
        (-np.ones(37), "not negative"),
        (np.zeros(37), "not zero in every weight"),
        (np.full(37, np.nan), "finite"),
    ],
)
def test_wrong_weights_are_named(points, weights, message):
    with pytest.raises(ValueError, match=message):
        model().fit(points[0], sample_weight=weights)
