"""The affine map and the sum of columns that is its bias's gradient."""

import pytest
import torch
from torch.nn import functional as F

from primal_attention.ops.column_sum import linear

from .formulas import assert_same, randn
from .fused import DEVICES, TOLERANCES, assert_bits, assert_near, poisoned_memory

fused = pytest.importorskip("primal_attention.ops.column_sum.triton", exc_type=ImportError)
add_up = fused.add_up

D, E = 5, 7
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over rows.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(*lead):
    return [randn(*lead, D), randn(E, D, seed=1), randn(E, seed=2)]


@pytest.mark.parametrize("lead", [(3, 11), (11,), (0, 3)])
def test_it_is_linear(lead):
    assert_same(
        lambda *t: [linear(*t)], lambda *t: [F.linear(*t)], inputs(*lead)
    )  # fmt: skip


def test_gradients_of_gradients():
    leaves = [t.requires_grad_() for t in inputs(2, 3)]
    assert torch.autograd.gradcheck(linear, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(linear, leaves, fast_mode=True)


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1)])
def test_frozen_inputs(frozen):
    leaves = [t.requires_grad_(i not in frozen) for i, t in enumerate(inputs(2, 3))]
    linear(*leaves).sum().backward()
    assert [i for i, leaf in enumerate(leaves) if leaf.grad is None] == list(frozen)


def test_opcheck():
    leaves = [t.requires_grad_() for t in inputs(2, 3)]
    backward = leaves[0].detach(), leaves[1].detach(), randn(2, 3, E), True, False
    ops = torch.ops.primal_attention
    for op, arguments in ((ops.linear_forward, leaves), (ops.linear_backward, backward)):
        results = torch.library.opcheck(op.default, tuple(arguments))
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (67, 131), (128, 128), (301, 5)])
def test_the_fused_sum(device, dtype, rows, columns, monkeypatch):
    """In one pass, or in two beyond a hundred rows."""
    monkeypatch.setattr(fused, "_PROGRAMS", 3)
    monkeypatch.setattr(fused, "_FEW", 100)
    matrix = randn(rows, columns).to(device, dtype)
    total = fused.column_sum(matrix)
    assert total.dtype == dtype
    assert_near([total], [matrix.double().sum(0)], TOLERANCES[dtype])
    assert_bits([total], [fused.column_sum(matrix)])


def test_the_fused_sum_of_views(device):
    wide = randn(37, 33).float().to(device)
    for view in (wide[:, 3:9], wide.mT, wide[::2]):
        assert_near([fused.column_sum(view)], [view.double().sum(0)], 1e-6)


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)])
def test_the_fused_backward(device, wanted):
    x, weight, _ = (t.float().to(device) for t in inputs(3, 11))
    d_y = randn(3, 11, E, seed=5).float().to(device)
    assert fused.takes(x, weight, d_y)
    assert not fused.takes(x, weight, d_y.double())
    assert not fused.takes(x, weight, d_y[:0])
    backward = torch.ops.primal_attention.linear_backward
    expected = backward(x.double(), weight.double(), d_y.double(), *wanted)
    assert_near(fused.backward(x, weight, d_y, *wanted), expected, 1e-6)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_layer_on_a_gpu_takes_it(device, monkeypatch):
    from primal_attention import PrimalAttention

    calls, run = [], fused.backward
    monkeypatch.setattr(fused, "backward", lambda *x: calls.append(1) or run(*x))
    layer = PrimalAttention(15, 3, 5, weights="static").to(device)
    layer(torch.randn(2, 11, 15, device=device)).sum().backward()
    assert calls


@pytest.mark.parametrize("number", [1, 29, 67, 301])
def test_parts_are_added_up(device, number):
    """Few and many, into contiguous totals and transposed ones, several in one launch.

    Of the last, the parts of each entry of the first axis are neighbours.
    """
    parts = [
        randn(number, 5, 41).to(device).float(),
        randn(3, 7, seed=1).to(device).float(),
        randn(3, number, 2, 43, seed=2).to(device).float().transpose(0, 1),
    ]
    totals = [
        torch.empty(41, 5, device=device).mT,
        torch.empty(7, device=device),
        torch.empty(3, 2, 43, device=device),
    ]
    add_up(*zip(parts, totals, strict=True))
    assert_near(totals, [part.double().sum(0) for part in parts], 1e-6)
