"""An objective that would be missing or without a gradient is an error; freezing is not."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from primal_attention import ksvd_loss

from .cases import SELF, Stack, assert_near, gradients, loss_of, make_inputs, make_layer
from .definition import OBJECTIVES

kinds = pytest.mark.parametrize("kind", SELF)


def test_model_without_primal_layers():
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ValueError, match="Sequential has no Primal layer"):
        ksvd_loss(model)


def test_no_forward_pass():
    with pytest.raises(RuntimeError, match=r"no Primal layer has run in training mode"):
        ksvd_loss(make_layer())


def test_forward_pass_in_eval_mode_only():
    layer, inputs = make_layer().eval(), make_inputs()
    inputs.run(layer)
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        ksvd_loss(layer)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@kinds
def test_forward_pass_with_gradients_disabled(kind, context):
    layer, inputs = make_layer(kind), make_inputs(kind)
    with context():
        inputs.run(layer)
    with pytest.raises(RuntimeError, match="gradients disabled"):
        ksvd_loss(layer)
    inputs.run(layer)  # the next pass is as good as any
    assert loss_of(layer, "released").requires_grad


def test_one_layer_of_several_with_gradients_disabled():
    model, inputs = Stack("sampled"), make_inputs()
    inputs.run(model.first)
    with torch.no_grad():
        inputs.run(model.second)
    with pytest.raises(RuntimeError, match="gradients disabled"):
        ksvd_loss(model)


@kinds
def test_re_entrant_checkpointing(kind):
    layer, inputs = make_layer(kind), make_inputs(kind)

    def forward(x):
        return layer(x, **inputs.masks)

    out = checkpoint(forward, inputs.x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        ksvd_loss(layer)
    out.sum().backward()  # the repeated pass has gradients, but comes too late
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        ksvd_loss(layer)


@pytest.mark.parametrize("model", [make_layer(), nn.Linear(2, 3)], ids=["primal", "no primal"])
def test_unknown_objective_is_named_with_the_known_ones(model):
    with pytest.raises(ValueError, match="got 'kkt'") as error:
        ksvd_loss(model, objective="kkt")
    for objective in OBJECTIVES:
        assert repr(objective) in str(error.value)


def test_default_objective_is_released():
    layer, inputs = make_layer(), make_inputs()
    inputs.run(layer)
    assert_near(ksvd_loss(layer), loss_of(layer, "released"))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("frozen", ["q_proj", "k_proj", "h_proj", "w_e", "raw_lambda", "proj"])
@kinds
def test_frozen_parameters_leave_the_other_gradients_as_they_are(kind, frozen, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    inputs.run(layer)
    expected = gradients(loss_of(layer, objective), layer)
    for name, parameter in layer.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
            del expected[name]
    inputs.run(layer)
    assert_near(gradients(loss_of(layer, objective), layer), expected)


def test_everything_frozen_is_a_constant():
    layer, inputs = make_layer().requires_grad_(False), make_inputs()
    layer(inputs.x.detach())
    assert not loss_of(layer, "released").requires_grad
