"""How many operations an objective adds to a step: on a GPU each would be a launch or more."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention import ksvd_loss

from .cases import CROSS, SELF, make_inputs, make_layer

VIEWS = {
    "_unsafe_view",
    "alias",
    "detach",
    "expand",
    "permute",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}
# A number among tensors stays on the host.
FREE = VIEWS | {"empty", "empty_like", "new_empty", "promote_types", "scalar_tensor"}


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
def test_the_objective_of_a_layer_is_a_handful_of_operations(kind, objective):
    layer, inputs = make_layer(kind), make_inputs(kind)
    inputs.run(layer)
    names, loss = ran(lambda: ksvd_loss(layer, objective=objective))
    assert len(names) <= (40 if kind == "dual causal" else 25)
    names, _ = ran(lambda: torch.autograd.grad(loss, layer.raw_lambda))
    assert len(names) <= 40


def test_an_ordinary_step_is_a_bounded_number_of_operations():
    layer, inputs = make_layer(), make_inputs(masked=False)
    names, y = ran(lambda: inputs.run(layer))
    assert len(names) <= 40
    names, _ = ran(lambda: (y.sum() + ksvd_loss(layer)).backward())
    assert len(names) <= 130


def test_weights_are_no_parameters():
    """A sharded layer frees these right after its forward pass."""
    layer, inputs = make_layer("static"), make_inputs("static")
    inputs.run(layer)
    run = layer.passes.runs[0]
    for kept, parameter in ((run.sums.weights[0], layer.w_e), (run.sums.weights[1], layer.w_r)):
        assert torch.equal(kept, parameter)
        assert kept.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
