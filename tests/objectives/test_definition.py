"""Values and gradients are those of the definition, with explicit scores and kernel matrices."""

import pytest
import torch

from .cases import ALL, SELF, assert_near, gradients, loss_of, make_inputs, make_layer
from .definition import OBJECTIVES, layer_objective, runs

masking = pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])


@masking
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("kind", ALL)
def test_objective_and_its_gradients_equal_the_definition(kind, objective, masked):
    layer, inputs = make_layer(kind), make_inputs(kind, masked=masked)
    inputs.run(layer)
    actual = loss_of(layer, objective)
    expected = layer_objective(runs(layer, inputs.x, inputs.context, **inputs.masks), objective)
    assert_near(actual, expected)
    assert expected > 1e-4
    assert_near(
        gradients(actual, layer, inputs.tensors()), gradients(expected, layer, inputs.tensors())
    )


@pytest.mark.parametrize("kind", SELF)
def test_gradients_reach_what_the_objective_depends_on_and_nothing_else(kind):
    layer, inputs = make_layer(kind), make_inputs(kind)
    inputs.run(layer)
    grads = gradients(loss_of(layer, "explained_energy"), layer, inputs.tensors())
    for name, grad in grads.items():
        output_only = name.startswith(("score_proj", "out_proj"))
        assert bool((grad != 0).any()) is not output_only, name
    padded = ~inputs.masks["token_mask"]
    assert (grads["input 0"][padded] == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_dual_causal_takes_the_weights_after_the_last_token(objective):
    causal, plain, inputs = make_layer("dual causal"), make_layer("dual"), make_inputs()
    causal.load_state_dict(plain.state_dict())
    inputs.run(causal), inputs.run(plain)
    assert_near(loss_of(causal, objective), loss_of(plain, objective))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_second_derivatives_equal_those_of_the_definition(objective):
    layer, inputs = make_layer("dual"), make_inputs()
    inputs.run(layer)
    named = [loss_of(layer, objective)]
    named.append(layer_objective(runs(layer, inputs.x, **inputs.masks), objective))
    penalties = []
    for value in named:
        (grad,) = torch.autograd.grad(value, inputs.x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().sum(), layer.q_proj.weight)[0])
    assert_near(*penalties, tolerance=1e-9)
