"""Padding is in no objective, and a sequence of nothing else is left out."""

import pytest
import torch

from .cases import (
    ALL,
    CROSS,
    SELF,
    D,
    H,
    N,
    S,
    assert_near,
    gradients,
    loss_of,
    make_inputs,
    make_layer,
)
from .definition import OBJECTIVES

kinds = pytest.mark.parametrize("kind", ALL)
objectives = pytest.mark.parametrize("objective", OBJECTIVES)


def measure(layer, inputs, objective):
    inputs.run(layer)
    value = loss_of(layer, objective)
    return {"value": value.detach(), **gradients(value, layer, inputs.tensors())}


def assert_finite(measured):
    for name, tensor in measured.items():
        assert tensor.isfinite().all(), name


@objectives
@kinds
def test_sequences_without_real_tokens_are_left_out(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    real = torch.stack([mask.any(1) for mask in inputs.masks.values()]).all(0)
    assert 0 < real.sum() < len(real)
    masks = {name: mask[real] for name, mask in inputs.masks.items()}
    x, context = (
        None if tensor is None else tensor.detach()[real].requires_grad_()
        for tensor in (inputs.x, inputs.context)
    )
    without = measure(layer, inputs._replace(x=x, context=context, masks=masks), objective)
    with_empty = measure(layer, inputs, objective)
    for name, expected in without.items():
        actual = with_empty[name]
        assert_near(actual[real] if name.startswith("input") else actual, expected)
        if name.startswith("input"):
            assert (actual[~real] == 0).all()


@objectives
@kinds
def test_batch_of_empty_sequences_gives_zero(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    masks = {name: torch.zeros_like(mask) for name, mask in inputs.masks.items()}
    measured = measure(layer, inputs._replace(masks=masks), objective)
    assert measured.pop("value") == 0
    for name, grad in measured.items():
        assert (grad == 0).all(), name


@objectives
@kinds
def test_content_of_padding_has_no_influence(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    clean = measure(layer, inputs, objective)
    poisoned = []
    for tensor, mask in zip(inputs.tensors(), inputs.masks.values(), strict=True):
        poison = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30])
        junk = poison[torch.randint(4, tensor.shape)].to(tensor.dtype)
        poisoned.append(torch.where(mask[:, :, None], tensor, junk).detach().requires_grad_())
    x, context = poisoned if len(poisoned) == 2 else (poisoned[0], None)
    assert_near(measure(layer, inputs._replace(x=x, context=context), objective), clean, 0.0)


@objectives
@kinds
def test_appended_padding_has_no_influence(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    expected = measure(layer, inputs, objective)
    more = torch.randn(len(inputs.x), 13, D, dtype=torch.float64)
    x = torch.cat([inputs.x.detach(), more], dim=1).requires_grad_()
    token_mask = torch.cat([inputs.masks["token_mask"], torch.zeros(more.shape[:2]).bool()], dim=1)
    masks = {**inputs.masks, "token_mask": token_mask}
    actual = measure(layer, inputs._replace(x=x, masks=masks), objective)
    actual["input 0"] = actual["input 0"][:, :N]
    assert_near(actual, expected)


@objectives
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", [kind for kind in ALL if "bias" not in kind])
def test_zero_input_is_finite(kind, bias, objective):
    layer, inputs = make_layer(kind, bias=bias), make_inputs(kind)
    zeros = [torch.zeros_like(tensor, requires_grad=True) for tensor in inputs.tensors()]
    x, context = zeros if len(zeros) == 2 else (zeros[0], None)
    assert_finite(measure(layer, inputs._replace(x=x, context=context), objective))


@pytest.mark.parametrize("kind", ["static", "static causal", "sampled", "dual"])
def test_kernel_without_energy_has_nothing_unexplained(kind):
    layer = make_layer(kind, bias=False)
    layer(torch.zeros(2, N, D, dtype=torch.float64))
    assert loss_of(layer, "explained_energy") == 0


def test_one_head_without_energy_counts_as_explained():
    layer, inputs = make_layer("static", bias=False), make_inputs(masked=False)
    with torch.no_grad():
        layer.q_proj.weight[: D // H] = 0.0  # the queries of head 0
    measured = measure(layer, inputs, "explained_energy")
    assert_finite(measured)
    with torch.no_grad():
        layer.w_e[1] = 0.0  # head 1 then explains nothing
    assert measure(layer, inputs, "explained_energy")["value"] == pytest.approx(1 / H)
    assert layer.w_e.shape == (H, D // H, S)


@objectives
@pytest.mark.parametrize("scale", [1e-10, 1e4])
@pytest.mark.parametrize("kind", {**SELF, **CROSS})
def test_tiny_and_large_inputs_are_finite_in_float32(kind, scale, objective):
    layer = make_layer(kind, dtype=torch.float32)
    inputs = make_inputs(kind, dtype=torch.float32)
    scaled = [(tensor * scale).detach().requires_grad_() for tensor in inputs.tensors()]
    x, context = scaled if len(scaled) == 2 else (scaled[0], None)
    assert_finite(measure(layer, inputs._replace(x=x, context=context), objective))
