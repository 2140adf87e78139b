"""Training without an objective: Lambda has the gradient zero, and all other parameters theirs."""

import pytest
import torch
from torch.func import functional_call, jvp, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from primal_attention import ksvd_loss

from .cases import OTHERS, SELF, make_inputs, make_layer

KINDS = {**SELF, **OTHERS}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def no_compiled_graphs():
    torch.compiler.reset()


def call_checkpointed(layer):
    return lambda x, **masks: checkpoint(layer, x, use_reentrant=False, **masks)


def call_compiled(layer):
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


FORMS = {
    "eager": lambda layer: layer,
    "checkpointed": call_checkpointed,
    "compiled": call_compiled,
}


@pytest.mark.parametrize("form", FORMS)
@kinds
def test_every_parameter_has_a_gradient(kind, form):
    layer, inputs = make_layer(kind), make_inputs()
    FORMS[form](layer)(inputs.x, **inputs.masks).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert not [name for name, grad in grads.items() if grad is None]
    zero = {name for name, grad in grads.items() if not grad.any()}
    unused = {"e": {"w_r"}, "r": {"w_e"}}.get(layer.scores, set()) if "w_e" in grads else set()
    assert {"raw_lambda"} <= zero
    assert unused <= zero


@kinds
def test_an_objective_trains_lambda(kind):
    layer, inputs = make_layer(kind), make_inputs()
    (layer(inputs.x, **inputs.masks).square().sum() + ksvd_loss(layer)).backward()
    assert layer.raw_lambda.grad.any()


@kinds
def test_lambda_is_in_no_graph_of_a_frozen_layer_or_of_evaluation(kind):
    layer, inputs = make_layer(kind).requires_grad_(False), make_inputs()
    x = inputs.x.detach()
    assert not layer(x, **inputs.masks).requires_grad
    layer.raw_lambda.requires_grad_(True)
    assert not layer.eval()(x, **inputs.masks).requires_grad


def test_the_gradient_of_lambda_is_differentiable():
    layer, inputs = make_layer(), make_inputs()
    out = layer(inputs.x, **inputs.masks).square().sum()
    grads = torch.autograd.grad(out, list(layer.parameters()), create_graph=True)
    total = sum(grad.square().sum() for grad in grads)
    second = torch.autograd.grad(total, list(layer.parameters()), allow_unused=True)
    assert all(grad.isfinite().all() for grad in second if grad is not None)


def test_outputs_may_be_changed_in_place():
    layer, inputs = make_layer(), make_inputs()
    out = layer(inputs.x, **inputs.masks)
    out.mul_(2.0).sum().backward()
    assert not layer.raw_lambda.grad.any()


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:The tensor attributes")
def test_training_layers_under_vmap_and_export():
    layers, inputs = [make_layer("static causal", seed=seed) for seed in range(3)], make_inputs()
    parameters, buffers = stack_module_state(layers)

    def run(parameters, buffers):
        return functional_call(layers[0], (parameters, buffers), (inputs.x,), inputs.masks)

    outputs = vmap(run)(parameters, buffers)
    for layer, found in zip(layers, outputs, strict=True):
        torch.testing.assert_close(layer(inputs.x, **inputs.masks), found)
    program = torch.export.export(layers[0], (inputs.x.detach(),), inputs.masks).module()
    torch.testing.assert_close(program(inputs.x, **inputs.masks), outputs[0])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # functorch's own
def test_forward_mode_is_that_of_evaluation():
    layer, x = make_layer("static"), make_inputs(masked=False).x.detach()

    def tangent():
        try:
            return jvp(layer, (x,), (torch.ones_like(x),))[1]
        except NotImplementedError as error:
            return str(error)

    in_training, in_evaluation = tangent(), (layer.eval(), tangent())[1]
    assert type(in_training) is type(in_evaluation)
    if isinstance(in_training, torch.Tensor):
        torch.testing.assert_close(in_training, in_evaluation)
