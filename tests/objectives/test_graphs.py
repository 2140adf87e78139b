"""The objectives under activation checkpointing and torch.compile."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from primal_attention import record_ksvd

from .cases import CROSS, SELF, Stack, assert_near, gradients, loss_of, make_inputs, make_layer
from .definition import OBJECTIVES

KINDS = {**SELF, **CROSS}
kinds = pytest.mark.parametrize("kind", KINDS)
objectives = pytest.mark.parametrize("objective", OBJECTIVES)


@pytest.fixture(autouse=True)
def no_compiled_graphs():
    torch.compiler.reset()


def task(outputs):
    return outputs.square().mean()


def step_of(model, inputs, objective):
    """Loss, gradients and the number of passes of a step written out in eager mode."""
    loss = task(inputs.run(model)) + loss_of(model, objective)
    return loss.detach(), gradients(loss, model, inputs.tensors())


def checkpointed(model):
    def forward(x, context=None, **masks):
        return checkpoint(model, x, context, use_reentrant=False, **masks)

    return forward


def passes_of(model):
    """The passes that are kept, told apart by the memory of their Lambda."""
    return [
        [run.lambda_diag.data_ptr() for run in layer.passes.runs]
        for layer in (model.first, model.second)
    ]


def backward_of(forward, model, inputs, objective):
    """The same by a real backward pass, since the repeated forward passes happen inside it."""
    model.zero_grad()
    for tensor in inputs.tensors():
        tensor.grad = None
    loss = task(inputs.run(forward)) + loss_of(model, objective)
    before = passes_of(model)
    loss.backward()
    assert passes_of(model) == before  # a repeated pass is not kept
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads |= {f"input {i}": tensor.grad for i, tensor in enumerate(inputs.tensors())}
    return loss.detach(), grads


@objectives
@kinds
def test_checkpointing_gives_the_same_step(kind, objective):
    model, inputs = Stack(kind), make_inputs(kind)
    loss, grads = step_of(model, inputs, objective)
    actual, actual_grads = backward_of(checkpointed(model), model, inputs, objective)
    assert_near(actual, loss, 0.0)
    assert_near(actual_grads, grads, 1e-12)
    assert len(model.first.passes.runs) == len(model.second.passes.runs) == 1


@kinds
def test_checkpointing_inside_record_ksvd(kind):
    model, inputs = Stack(kind), make_inputs(kind)
    loss, grads = step_of(model, inputs, "released")
    with record_ksvd(model):
        actual, actual_grads = backward_of(checkpointed(model), model, inputs, "released")
        assert len(model.first.passes.runs) == len(model.second.passes.runs) == 1
        inputs.run(checkpointed(model))
        assert len(model.first.passes.runs) == len(model.second.passes.runs) == 2
    assert_near(actual, loss, 0.0)
    assert_near(actual_grads, grads, 1e-12)


def test_one_checkpointed_layer_of_two():
    model, inputs = Stack("sampled"), make_inputs()
    loss, grads = step_of(model, inputs, "explained_energy")

    def forward(x, context=None, **masks):
        x = x + checkpoint(model.first, x, use_reentrant=False, **masks)
        return x + model.second(x, **masks)

    actual, actual_grads = backward_of(forward, model, inputs, "explained_energy")
    assert_near(actual, loss, 0.0)
    assert_near(actual_grads, grads, 1e-12)


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@kinds
def test_compiled_layer(kind):
    layer, inputs = make_layer(kind), make_inputs(kind)
    forward = compiled(layer)
    inputs.run(forward)  # the layer itself has not run before
    assert len(layer.passes.runs) == 1
    for objective in OBJECTIVES:
        loss, grads = step_of(layer, inputs, objective)
        compiled_loss = task(inputs.run(forward)) + loss_of(layer, objective)
        assert_near(compiled_loss, loss, 1e-12)
        assert_near(gradients(compiled_loss, layer, inputs.tensors()), grads, 1e-12)


@pytest.mark.parametrize("kind, objective", list(zip(KINDS, OBJECTIVES * 2, strict=False)))
def test_compiled_step(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)

    @compiled
    def step(x, context, masks):
        return task(layer(x, context, **masks)) + loss_of(layer, objective)

    loss, grads = step_of(layer, inputs, objective)
    for _ in range(2):
        actual = step(inputs.x, inputs.context, inputs.masks)
        assert_near(actual, loss, 1e-12)
        assert_near(gradients(actual, layer, inputs.tensors()), grads, 1e-12)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, on the first pass
def test_compiled_model_inside_record_ksvd():
    model, inputs, other = Stack("sampled"), make_inputs(), make_inputs(seed=1)
    with record_ksvd(model):
        outputs = inputs.run(model), other.run(model)
        loss = task(outputs[0]) + task(outputs[1]) + loss_of(model, "released")
    grads = gradients(loss, model)
    forward = compiled(model)
    with record_ksvd(model):
        outputs = inputs.run(forward), other.run(forward)
        actual = task(outputs[0]) + task(outputs[1]) + loss_of(model, "released")
    assert len(model.first.passes.runs) == 2
    assert_near(actual, loss, 1e-12)
    assert_near(gradients(actual, model), grads, 1e-12)


def test_checkpointed_compiled_model():
    model, inputs = Stack("static causal"), make_inputs()
    loss, grads = step_of(model, inputs, "released")
    actual, actual_grads = backward_of(checkpointed(compiled(model)), model, inputs, "released")
    assert_near(actual, loss, 1e-12)
    assert_near(actual_grads, grads, 1e-12)
