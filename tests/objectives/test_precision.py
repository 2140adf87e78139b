"""Whatever the precision of the model, an objective has at least float32."""

import pytest
import torch

from .cases import CROSS, SELF, assert_near, gradients, loss_of, make_inputs, make_layer
from .definition import OBJECTIVES

kinds = pytest.mark.parametrize("kind", {**SELF, **CROSS})
objectives = pytest.mark.parametrize("objective", OBJECTIVES)
HALF = [torch.bfloat16, torch.float16]


def relative_error(actual, expected):
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@objectives
@kinds
def test_loss_inside_autocast_equals_the_one_outside(kind, objective):
    layer = make_layer(kind, dtype=torch.float32)
    inputs = make_inputs(kind, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert inputs.run(layer).dtype == torch.bfloat16
        inside = loss_of(layer, objective)
    outside = loss_of(layer, objective)
    assert inside.dtype == outside.dtype == torch.float32
    assert_near(inside, outside, 0.0)
    grads, expected = (gradients(loss, layer, inputs.tensors()) for loss in (inside, outside))
    assert_near(grads, expected, 0.0)


@objectives
@kinds
def test_forward_pass_in_autocast_is_near_float32(kind, objective):
    layer = make_layer(kind, dtype=torch.float32)
    inputs = make_inputs(kind, dtype=torch.float32)
    inputs.run(layer)
    expected = loss_of(layer, objective)
    with torch.autocast("cpu", torch.bfloat16):
        inputs.run(layer)
    assert relative_error(loss_of(layer, objective).detach(), expected.detach()) < 2**-4


@objectives
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64])
@kinds
def test_dtype_of_the_loss(kind, dtype, objective):
    layer, inputs = make_layer(kind, dtype=dtype), make_inputs(kind, dtype=dtype)
    inputs.run(layer)
    loss = loss_of(layer, objective)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    grads = gradients(loss, layer, inputs.tensors())
    assert {grad.dtype for grad in grads.values()} == {dtype}
    assert all(grad.isfinite().all() for grad in grads.values())


@objectives
@pytest.mark.parametrize("dtype", HALF)
@kinds
def test_half_precision_sums_are_accumulated_in_float32(kind, dtype, objective):
    """The loss differs from that of the same rounded numbers in float64 by single roundings."""
    layer, inputs = make_layer(kind, dtype=dtype), make_inputs(kind, dtype=dtype)
    inputs.run(layer)
    rounded = loss_of(layer, objective)
    layer.double()
    exact = [tensor.detach().double() for tensor in inputs.tensors()]
    layer(*exact, **inputs.masks)
    assert relative_error(rounded.detach(), loss_of(layer, objective).detach()) < 2**-4


@kinds
def test_float32_is_near_float64(kind):
    for objective in OBJECTIVES:
        layer, inputs = make_layer(kind), make_inputs(kind)
        inputs.run(layer)
        expected = loss_of(layer, objective).detach()
        layer.float()
        layer(*(tensor.detach().float() for tensor in inputs.tensors()), **inputs.masks)
        assert relative_error(loss_of(layer, objective).detach(), expected) < 1e-4
