"""Half precision: inputs are rounded, sums are not."""

from functools import partial

import pytest
import torch

from primal_attention.ops.moment import moment
from primal_attention.ops.moment import reference as moment_reference
from primal_attention.ops.primal import primal_attention
from primal_attention.ops.primal import reference as primal_reference
from primal_attention.ops.scan import reference as scan_reference
from primal_attention.ops.scan import scan

from .formulas import B, C, H, S, assert_identical, gradients, randn, token_masks

LENGTH = 97
HALVES = [torch.bfloat16, torch.float16]


def primal_inputs():
    lead = [randn(B, LENGTH, H, C), randn(B, LENGTH, H, C, seed=1)]
    weights = [randn(B, H, C, S, seed=2), randn(B, H, C, S, seed=3)]
    return [*lead, *weights, randn(S, C, seed=4), randn(S, C, seed=5), randn(C, seed=6)]


def scan_inputs():
    return [
        randn(B, LENGTH, H, C),
        randn(B, LENGTH, H, C, seed=1),
        randn(B, LENGTH, H, S, seed=2),
        randn(S, C, seed=3),
    ]


def moment_inputs():
    return [randn(B, LENGTH, H, C), randn(B, LENGTH, H, S, seed=1)]


def tuple_of(op):
    return lambda *x, **options: (op(*x, **options),)


OPS = {
    "primal": (primal_attention, primal_reference.primal_attention, primal_inputs),
    "scan": (scan, scan_reference.scan, scan_inputs),
    "moment": (tuple_of(moment), tuple_of(moment_reference.moment), moment_inputs),
}


def worst(actual, exact):
    return max(
        float((got.double() - want).norm() / want.norm())
        for got, want in zip(actual, exact, strict=True)
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", OPS)
def test_the_error_is_at_most_twice_that_of_the_reference(name, dtype):
    op, reference, make = OPS[name]
    options = {"token_mask": token_masks(B, LENGTH)["holes"]}
    rounded = [x.to(dtype) for x in make()]
    exact = gradients(partial(reference, **options), [x.double() for x in rounded])
    eager = gradients(partial(reference, **options), rounded)
    ours = gradients(partial(op, **options), rounded)
    for part in (0, 1):  # values, gradients
        allowed = 2 * worst(eager[part], exact[part]) + 1e-6
        assert worst(ours[part], exact[part]) <= allowed
        for got, want in zip(ours[part], eager[part], strict=True):
            assert got.dtype == want.dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_are_in_float32(dtype):
    """A half-precision sum of 5,000 equal numbers is off by more than a tenth."""
    length = 5000
    z = torch.ones(1, length, 1, 1, dtype=dtype)
    w, c = torch.ones(1, 1, 1, dtype=dtype), torch.ones(1, 1, dtype=dtype)
    result = primal_attention(z, z, w, w, c, c)
    assert result.out.dtype == dtype
    assert result.gram_q.dtype == result.gram_k.dtype == torch.float32
    total = moment(z, z)
    state = scan(z, z, z).state
    for sums in (result.gram_q, result.gram_k, total, state):
        assert sums.dtype == torch.float32
        assert sums.item() == pytest.approx(length, rel=1e-5)


@pytest.mark.parametrize("name", OPS)
def test_autocast_does_not_lower_the_sums(name):
    op, _, make = OPS[name]

    def under_autocast(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return op(*inputs)

    inputs = [x.float() for x in make()]
    assert_identical(gradients(under_autocast, inputs), gradients(op, inputs))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("scale", [0.0, 1e-15, 1e15])
def test_queries_of_any_size_give_finite_values_and_gradients(name, scale):
    op, _, make = OPS[name]
    first, second, *rest = (x.float() for x in make())
    inputs = [first * scale, second if name == "moment" else second * scale, *rest]
    for part in gradients(op, inputs):
        for tensor in part:
            assert tensor.isfinite().all()
