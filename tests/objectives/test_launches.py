"""How many operations an objective adds to a step: on a GPU each would be a launch or more."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention import ksvd_loss, record_ksvd

from .cases import CROSS, SELF, Stack, make_inputs, make_layer

VIEWS = {"view", "select", "unbind", "detach", "expand", "transpose", "alias", "slice", "unsqueeze"}
FREE = VIEWS | {"empty", "new_empty", "promote_types"}


class Counter(TorchDispatchMode):
    """Names the operations that would be launched."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if name not in FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def ran(function):
    with Counter() as counter:
        result = function()
    return counter.names, result


@pytest.mark.parametrize("objective", ["zero", "released"])
@pytest.mark.parametrize("kind", {**SELF, **CROSS})
def test_the_objective_of_a_layer_is_one_operation_each_way(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    inputs.run(layer)
    names, loss = ran(lambda: ksvd_loss(layer, objective=objective))
    assert names == ["ksvd_forward"]
    run = layer.ksvd_runs[0]
    names, _ = ran(lambda: torch.autograd.grad(loss, [run.grams.q, run.grams.k, run.lambda_diag]))
    assert names == ["ones_like", "ksvd_backward"]


def test_the_mean_over_the_batch_is_squared_afterwards():
    layer, inputs = make_layer(), make_inputs()
    inputs.run(layer)
    names, _ = ran(lambda: ksvd_loss(layer, objective="released_batch"))
    assert names == ["ksvd_forward", "pow"]


def test_layers_and_passes_are_added_up_once():
    model, inputs = Stack("sampled"), make_inputs()
    inputs.run(model)
    names, _ = ran(lambda: ksvd_loss(model))
    assert names == ["ksvd_forward"] * 2 + ["stack", "mean"]
    layer = make_layer()
    with record_ksvd(layer):
        inputs.run(layer), inputs.run(layer)
    names, _ = ran(lambda: ksvd_loss(layer))
    assert names.count("ksvd_forward") == 2
    assert len(names) <= 16


def test_batched_weights_are_kept_without_a_copy():
    """But static ones are parameters, which a sharded layer takes away."""
    layer, inputs = make_layer("static"), make_inputs("static")
    inputs.run(layer)
    run = layer.ksvd_runs[0]
    for kept, parameter in ((run.w_e_given_x, layer.w_e), (run.w_r_given_x, layer.w_r)):
        assert torch.equal(kept, parameter)
        assert kept.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
    for kind in ("sampled", "dual"):
        layer, inputs = make_layer(kind), make_inputs(kind)
        names, _ = ran(lambda layer=layer, inputs=inputs: inputs.run(layer))
        assert "_to_copy" not in names
