"""Fused J from Gram matrices, and sums of columns, against plain PyTorch."""

import pytest
import torch

from primal_attention.ops.objective import MeanJInputs, mean_j
from primal_attention.ops.op import fused, fused_ops

from .formulas import randn
from .fused import DEVICES, TOLERANCES, _values_and_gradients, assert_near, poisoned_memory

B, H, P, S = 3, 2, 5, 7
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over tokens.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def tensors(device, *, static=False, own=False, batch=B, width=P, directions=S):
    """Gram matrices, weights, Lambda and the trace."""
    grams = [x @ x.mT for x in (randn(batch, H, width, 9, seed=i) for i in range(2))]
    lead = (H,) if static else (batch, H)
    weights = [randn(*lead, width, directions, seed=2 + i) for i in range(2)]
    given = [*grams, *weights, randn(H, directions, seed=4).abs()]
    trace = None if own else randn(H, seed=5).float().to(device)
    grams_and_weights = [x.float().to(device) for x in given]
    return [*grams_and_weights[:4], trace, grams_and_weights[4]]


def by_formula(num_queries, num_keys, options):
    """J by its formula in plain PyTorch."""

    def run(gram_q, gram_k, w_e, w_r, trace, lambda_diag):
        energies = [((gram @ w) * w).sum(-2) for gram, w in ((gram_q, w_e), (gram_k, w_r))]
        if trace is None:
            trace = (w_e * w_r).sum((-2, -1))
        counts = num_queries, num_keys
        return [mean_j(torch.stack(energies), trace, lambda_diag, *counts, **options)]

    return run


OPTIONS = [
    {"averaged": True, "lambda_squared": True, "squared": True},
    {"averaged": False, "lambda_squared": False, "squared": True},
    {"averaged": True, "lambda_squared": True, "squared": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("static", "own"), [(True, False), (False, True), (True, True)])
def test_values_and_gradients(device, options, static, own):
    check(tensors(device, static=static, own=own), options, device)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 70, 33), (5, 17, 65)])
def test_sizes(device, sizes):
    batch, width, directions = sizes
    given = tensors(device, batch=batch, width=width, directions=directions, static=True)
    check(given, OPTIONS[0], device)


def check(given, options, device, tolerance=1e-5):
    batch = len(given[0])
    num_queries = torch.tensor([5, 0, 3, 7, 2][:batch], device=device)
    num_keys = torch.tensor([4, 2, 6, 0, 1][:batch], device=device)

    def run(*x):
        with fused_ops("always"):
            result = fused("mean_j", MeanJInputs(*x, num_queries, num_keys, **options))
        assert result is not None
        return result

    found = _values_and_gradients(run, given)
    exact = [None if x is None else x.double() for x in given]
    expected = _values_and_gradients(by_formula(num_queries, num_keys, options), exact)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other, tolerance)


def test_gradients_of_gradients(device):
    given = tensors(device, own=True)
    counts = torch.tensor([5, 0, 3], device=device), torch.tensor([4, 2, 6], device=device)

    def penalty(run, leaves):
        (value,) = run(*leaves[:4], None, leaves[4])
        grads = torch.autograd.grad(value, leaves, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in grads), leaves)

    def run(*x):
        with fused_ops("always"):
            return fused("mean_j", MeanJInputs(*x, *counts, **OPTIONS[0]))

    leaves = [x.requires_grad_() for x in given if x is not None]
    found = penalty(run, leaves)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    assert_near(found, penalty(by_formula(*counts, OPTIONS[0]), exact), 1e-4)


def test_what_is_not_supported(device):
    counts = torch.ones(B, device=device), torch.ones(B, device=device)
    given = tensors(device, own=True)
    single = MeanJInputs(*given, *counts, averaged=True)
    assert fused("mean_j", single) is None or device != "cpu"
    with fused_ops("always"):
        wide = [None if x is None else x.double() for x in given]
        assert fused("mean_j", MeanJInputs(*wide, *counts, averaged=True)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 69, 700])
def test_sums_of_columns(device, dtype, rows):
    launch = pytest.importorskip("primal_attention.ops.triton.launch")
    x = randn(rows, 150).to(dtype).to(device)
    assert_near([launch.column_sum(x)], [x.double().sum(0)], TOLERANCES[dtype])
