"""Rows put in another order: each goes to one place at most, and its gradient comes from there."""

import pytest
import torch

from primal_attention.ops.rows import moved

from .formulas import randn

THERE = torch.tensor([2, -1, 0, 4, -1, -1, 3])  # of five rows, number 1 goes nowhere
BACK = torch.tensor([2, -1, 0, 6, 3])


@pytest.mark.parametrize("shape", [(), (3,), (3, 2)])
def test_rows_stand_where_they_are_put(shape):
    rows = randn(5, *shape).requires_grad_()
    result = moved(rows, THERE, BACK)
    zero = torch.zeros(shape, dtype=rows.dtype)
    want = [zero if n < 0 else rows[n] for n in THERE]
    assert torch.equal(result, torch.stack(want))
    d_result = randn(7, *shape, seed=1)
    (d_rows,) = torch.autograd.grad(result, rows, d_result)
    assert torch.equal(d_rows, torch.stack([zero if n < 0 else d_result[n] for n in BACK]))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_changes_no_other(poison):
    rows = randn(5, 3)
    want = moved(rows, THERE, BACK)
    rows[[1, 4]] = poison
    got = moved(rows, THERE, BACK)
    assert torch.equal(got[THERE != 4], want[THERE != 4])
    assert not got[THERE < 0].any()


def test_autograd_and_fake_tensors():
    rows = randn(5, 3, 2).requires_grad_()
    torch.library.opcheck(torch.ops.primal_attention.moved, (rows, THERE, BACK))
    assert torch.autograd.gradcheck(moved, (rows, THERE, BACK))
    assert torch.autograd.gradgradcheck(moved, (rows, THERE, BACK))


def test_rows_with_gaps_between_them():
    rows = randn(5, 3, 4).transpose(1, 2)
    assert torch.equal(moved(rows, THERE, BACK), moved(rows.contiguous(), THERE, BACK))
