"""Fused ops as PyTorch sees them: the dispatcher, tracing, compilation, transforms."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from primal_attention.ops import op as op_module
from primal_attention.ops.op import Backward, FusedOp, fused, fused_ops

from .formulas import randn

B, N, M = 2, 3, 5


class Inputs(NamedTuple):
    x: Tensor
    w: Tensor
    bias: Tensor | None
    scale: float


class Product(FusedOp):
    """Scaled outputs, their sum over the rows, and what the backward pass is to be given."""

    name = "test_product"
    inputs = Inputs
    differentiable = ("x", "w", "bias")
    outputs = ("y", "total", "kept")
    num_outputs = first_kept = 2
    devices = ("cuda", "cpu")

    def supports(self, given: Inputs) -> bool:
        return given.x.dtype == torch.float64

    def empty(self, given: Inputs) -> Sequence[Tensor]:
        shape = (*given.x.shape[:-1], given.w.shape[1])
        return given.x.new_empty(shape), given.x.new_empty(shape[-1:]), given.x.new_empty(1)

    def forward(self, given: Inputs, *, keep: bool) -> Sequence[Tensor]:
        y, total = self.eager(given)
        return y, total, given.x.new_full((1,), given.scale) if keep else given.x.new_empty(0)

    def backward(self, given: Inputs, call: Backward) -> dict[str, Tensor]:
        dy, d_total = call.grads
        rows = given.x.new_zeros(self.empty(given)[0].shape) if dy is None else dy
        rows = rows if d_total is None else rows + d_total
        x, [scale] = given.x, call.kept
        found = {"w": scale * (x.flatten(0, -2).mT @ rows.flatten(0, -2))}
        found["bias"] = rows.flatten(0, -2).sum(0)
        return found | ({"x": scale * (rows @ given.w.mT)} if "x" in call.wanted else {})

    def eager(self, given: Inputs) -> Sequence[Tensor]:
        y = given.scale * (given.x @ given.w)
        y = y if given.bias is None else y + given.bias
        return y, y.flatten(0, -2).sum(0)


OP = Product()
FORWARD = torch.ops.primal_attention.test_product_forward


class Tests:
    """The backend of the op."""

    device_type = "cpu"

    def find(self, name):
        return OP if name == OP.name else None


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setitem(op_module.LARGE, OP.name, 1)
    monkeypatch.setitem(op_module.BACKENDS, Tests.device_type, Tests())


@pytest.fixture
def dispatched(monkeypatch):
    """What the dispatcher was given."""
    calls = []
    registered = OP.registered

    def call(*inputs):
        calls.append(inputs)
        return registered(*inputs)

    monkeypatch.setattr(OP, "registered", call)
    return calls


def inputs():
    return randn(B, N, M), randn(M, M, seed=1), randn(M, seed=2), 1.5


def leaves():
    *tensors, scale = inputs()
    return *(each.requires_grad_() for each in tensors), scale


def run(*given):
    outputs = fused("test_product", Inputs(*given))
    assert outputs is not None
    return outputs


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_plain_call_gives_the_same_without_the_dispatcher(dispatched, frozen, with_bias):
    results = []
    for function in (run, FORWARD):
        *tensors, scale = inputs()
        for number, each in enumerate(tensors):
            each.requires_grad_(number not in frozen)
        if not with_bias:
            tensors[2] = None
        y, total, *_ = function(*tensors, scale)
        asked = [each for each in tensors if each is not None and each.requires_grad]
        assert y.requires_grad == total.requires_grad == bool(asked)
        grads = torch.autograd.grad(y.square().sum() + total.sum(), asked) if asked else ()
        results.append([y, total, *grads])
    assert all(map(torch.equal, *results))
    assert not dispatched


def test_without_gradients(dispatched):
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y, _ = run(*leaves())
            assert not y.requires_grad
            assert torch.equal(y, FORWARD(*leaves())[0])
    assert not dispatched


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_of_gradients(output):
    def function(*tensors):
        return run(*tensors, 1.5)[output]

    *tensors, _ = leaves()
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_gradients_of_gradients_keep_to_their_inputs():
    """Where one input is made from another, its path is not counted twice."""
    x, w, _, scale = leaves()

    def penalty(function):
        made = x[0].mT @ x[0] + w
        y = function(x, made, None, scale)[0]
        dx, dm = torch.autograd.grad(y.square().sum(), (x, made), create_graph=True)
        return torch.autograd.grad(dx.square().sum() + dm.square().sum(), (x, w))

    def eager(*given):
        return OP.eager(Inputs(*given))

    for one, other in zip(penalty(run), penalty(eager), strict=True):
        torch.testing.assert_close(one, other)


def test_batches_of_gradients():
    """As torch.autograd.functional asks for them: by the eager form."""
    *tensors, scale = leaves()
    y, _ = run(*tensors, scale)
    basis = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    batches = torch.autograd.grad(y, tensors, basis, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(y, tensors, one, retain_graph=True) for one in basis]
    for batch, singles in zip(batches, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(batch, torch.stack(singles))


def test_products_are_counted_in_the_eager_form():
    with FlopCounterMode(display=False):
        assert fused("test_product", Inputs(*inputs())) is None


def test_it_is_registered_as_pytorch_expects():
    *tensors, scale = leaves()
    torch.library.opcheck(FORWARD.default, (*tensors, scale))
    turned = tensors[1].detach().mT.requires_grad_()
    torch.library.opcheck(FORWARD.default, (tensors[0], turned, None, scale))


def test_autocast_is_left_to_the_op(dispatched):
    x, w, bias = (each.detach() for each in leaves()[:3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = run(x.requires_grad_(), w, bias, 1.5)
    assert torch.equal(y, 1.5 * (x @ w) + bias)
    assert not dispatched


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Naming(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Sub(Tensor):
    """Some subclass."""


def test_modes_and_subclasses_see_the_op(dispatched):
    with Seeing() as mode:
        run(*inputs())
    assert FORWARD.default in mode.seen
    with Naming():
        run(*inputs())
    x, *rest = inputs()
    y, _ = run(x.as_subclass(Sub), *rest)
    assert isinstance(y, Sub)
    assert len(dispatched) == 3


def test_a_lazy_sign_goes_to_the_dispatcher(dispatched):
    x, *rest = inputs()
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    assert torch.equal(run(negative, *rest)[0], run(-x, *rest)[0])
    assert len(dispatched) == 1


def test_traced_graphs_hold_the_op():
    *tensors, scale = inputs()
    graph = make_fx(lambda *t: run(*t, scale))(*tensors).graph
    assert FORWARD.default in [node.target for node in graph.nodes]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_hold_the_op_and_its_gradients(dynamic):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda *t: run(*t, 1.5)[0], backend=keep, fullgraph=True, dynamic=dynamic
    )
    *tensors, scale = leaves()
    assert torch.equal(compiled(*tensors), run(*tensors, scale)[0])
    (graph,) = graphs
    assert FORWARD.default in [node.target for node in graph.graph.nodes]
    whole = torch.compile(lambda *t: run(*t, 1.5)[0], backend="aot_eager", fullgraph=True)
    results = []
    for function in (whole, lambda *t: run(*t, 1.5)[0]):
        y = function(*tensors)
        results.append([y, *torch.autograd.grad(y.square().sum(), tensors)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")
def test_transforms_tangents_and_scripts_take_the_eager_form():
    asked = []

    x, *rest = inputs()

    def ask(x):
        asked.append(fused("test_product", Inputs(x, *rest)))
        return x.sum()

    torch.func.grad(ask)(x)
    torch.func.vmap(ask)(x[None])
    torch.func.jvp(ask, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        ask(x)
    torch.jit.trace(ask, (x,), check_trace=False)
    assert asked == [None] * 5


class Asking(torch.nn.Module):
    """Not there without an op."""

    def forward(self, x, w):
        found = fused("test_product", Inputs(x, w, None, 1.5))
        return x @ w if found is None else found[0]


def test_exported_graphs_are_plain_pytorch():
    tensors = inputs()[:2]
    program = torch.export.export(Asking(), tensors)
    assert "primal_attention" not in str(program.graph)


def test_the_settings():
    given = Inputs(*inputs())
    assert fused("test_product", given) is not None
    with fused_ops("never"):
        assert fused("test_product", given) is None
        with fused_ops("always"):
            assert fused("test_product", given) is not None
    single = given._replace(x=given.x.float())
    assert fused("test_product", single) is None, "not supported"
    assert fused("test_product", given._replace(x=given.x[:0])) is None
    op_module.LARGE["test_product"] = given.x.numel() + 1
    assert fused("test_product", given) is None, "small work"
    with (
        pytest.raises(ValueError, match="'never', 'large' or 'always', got 'often'"),
        fused_ops("often"),
    ):
        pass
