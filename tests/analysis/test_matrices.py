"""Factors and whole matrices say the same, and both say what a dense SVD says."""

import math

import pytest
import torch

from primal_attention.analysis import matrices
from primal_attention.analysis.matrices import HeadMatrices

H, N, T, P = 3, 23, 17, 5


def factors(N=N, T=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (H, N, P), (H, T, P)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("N", "T"), [(N, T), (T, N), (3, 17), (17, 3), (1, 1)])
def test_singular_values_from_factors_are_those_of_the_product(N, T):
    heads = HeadMatrices(*factors(N, T))
    expected = torch.linalg.svdvals(heads.left @ heads.right.mT)[:, : min(N, T, P)]
    assert heads.shape == (H, N, T)
    assert_close(heads.singular_values(), expected)


def test_both_kinds_agree_in_everything():
    low = HeadMatrices(*factors(N, N))
    dense = HeadMatrices(low.dense())
    assert dense.shape == low.shape
    assert_close(low.inner_products(), dense.inner_products())
    assert_close(low.skew_norms(), dense.skew_norms())
    assert_close(matrices.asymmetry(low), matrices.asymmetry(dense))
    assert_close(matrices.head_redundancy(low), matrices.head_redundancy(dense))


def test_asymmetry_of_special_matrices():
    matrix = torch.randn(N, N, dtype=torch.float64)
    symmetric, skew = matrix + matrix.T, matrix - matrix.T
    upper = matrix.triu(1)
    found = matrices.asymmetry(HeadMatrices(torch.stack([symmetric, skew, upper])))
    assert_close(found, torch.tensor([0, 2, math.sqrt(2)], dtype=torch.float64))


def test_asymmetry_of_factors_keeps_its_digits_near_zero():
    left, _ = factors()
    assert matrices.asymmetry(HeadMatrices(left, left)).max() < 1e-13


def test_there_is_no_asymmetry_between_two_sequences():
    heads = HeadMatrices(torch.randn(H, N, N, dtype=torch.float64), crossing=True)
    assert matrices.asymmetry(heads).isnan().all()


def test_redundancy_is_the_mean_cosine_of_pairs():
    matrix = torch.zeros(3, 2, 2, dtype=torch.float64)
    matrix[0, 0, 0], matrix[1, 0, 0], matrix[2, 1, 1] = 5, 2, 3  # cosines 1, 0, 0
    assert float(matrices.head_redundancy(HeadMatrices(matrix))) == pytest.approx(1 / 3)
    assert matrices.head_redundancy(HeadMatrices(matrix[:1])).isnan()


def test_explained_energy_and_ranks():
    values = torch.tensor([[3.0, 2.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    explained = matrices.explained_energy(values)
    assert_close(explained[0], torch.tensor([9.0, 13.0, 14.0], dtype=torch.float64) / 14)
    assert (explained[1] == 1).all()
    assert matrices.directions_for(explained, 13 / 14).tolist() == [2, 1]
    assert matrices.directions_for(explained, 1.0).tolist() == [3, 1]


def test_effective_rank_of_equal_singular_values_is_their_number():
    values = torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    assert float(matrices.effective_rank(values)) == pytest.approx(3)
    assert float(matrices.effective_rank(values[:1])) == pytest.approx(1)


def test_row_entropy():
    uniform = torch.full((1, N, T), 1 / T, dtype=torch.float64)
    sharp = torch.eye(T, dtype=torch.float64)[None]
    assert float(matrices.row_entropy(HeadMatrices(uniform))) == pytest.approx(math.log(T))
    assert float(matrices.row_entropy(HeadMatrices(sharp))) == 0
    assert matrices.row_entropy(HeadMatrices(2 * sharp)).isnan(), "rows that are no distributions"
    assert matrices.row_entropy(HeadMatrices(sharp * 2 - uniform[:, :T])).isnan()


def test_long_factors_show_some_of_their_rows():
    left, right = (torch.rand(1, 3001, P, dtype=torch.float64) for _ in range(2))
    low = HeadMatrices(left, right)
    seen = torch.cat(list(low.row_blocks()), dim=1)
    assert_close(seen, low.dense()[:, ::3])


def test_blocks_of_rows_are_all_rows():
    left, right = (torch.rand(2, 601, P, dtype=torch.float64) for _ in range(2))
    left = left / (left @ right.mT).sum(-1, keepdim=True)
    low = HeadMatrices(left, right)
    assert_close(torch.cat(list(low.row_blocks()), dim=1), low.dense())
    assert_close(matrices.row_entropy(low), matrices.row_entropy(HeadMatrices(low.dense())))
