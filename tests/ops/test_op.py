"""An op gives the same by the short way and by the dispatcher, which sees what it has to see."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention.ops.op import Op
from primal_attention.precision import exact

from .formulas import randn

B, N, M = 2, 3, 5


@exact
def product(x: Tensor, w: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Scaled outputs, and the number of inputs behind each, which has no gradient."""
    y = scale * (x @ w)
    counts = x.new_full(x.shape[:-1], x.shape[-1])
    return (y if bias is None else y + bias), counts


def _empty_outputs(
    x: Tensor, w: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:-1], w.shape[1])), x.new_empty(x.shape[:-1])


def _save(ctx, inputs, output):
    x, w, bias, ctx.scale = inputs
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, w)


def _gradients(ctx, dy, _):
    x, w = ctx.saved_tensors
    dx, dw = ctx.scale * (dy @ w.mT), ctx.scale * (x.flatten(0, -2).mT @ dy.flatten(0, -2))
    return dx, dw, dy.flatten(0, -2).sum(0) if ctx.has_bias else None, None


OP = Op("test_product", product, _empty_outputs, gradients=_gradients, save=_save)
PLAIN = Op("test_plain_product", product, _empty_outputs)
REGISTERED = torch.ops.primal_attention.test_product


@pytest.fixture
def dispatched(monkeypatch):
    """What the dispatcher was given."""
    calls = []

    def counted(registered):
        def call(*inputs):
            calls.append(inputs)
            return registered(*inputs)

        return call

    for op in (OP, PLAIN):
        monkeypatch.setattr(op, "registered", counted(op.registered))
    return calls


def inputs():
    return randn(B, N, M), randn(M, M, seed=1), randn(M, seed=2), 1.5


def leaves():
    *tensors, scale = inputs()
    return *(each.requires_grad_() for each in tensors), scale


@pytest.mark.parametrize("frozen", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_plain_call_gives_the_same_without_the_dispatcher(dispatched, frozen, with_bias):
    results = []
    for function in (OP, REGISTERED):
        *tensors, scale = inputs()
        for number, each in enumerate(tensors):
            each.requires_grad_(number not in frozen)
        if not with_bias:
            tensors[2] = None
        y, counts = function(*tensors, scale)
        assert not counts.requires_grad
        asked = [each for each in tensors if each is not None and each.requires_grad]
        assert y.requires_grad == bool(asked)
        if asked:
            results.append([y, counts, *torch.autograd.grad(y.square().sum(), asked)])
        else:
            results.append([y, counts])
    assert all(map(torch.equal, *results))
    assert not dispatched


def test_without_gradients(dispatched):
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y, _ = OP(*leaves())
            assert not y.requires_grad
            assert torch.equal(y, REGISTERED(*leaves())[0])
    assert not dispatched


def test_parameters_are_plain(dispatched):
    *tensors, scale = inputs()
    y, _ = OP(*map(torch.nn.Parameter, tensors), scale)
    assert y.requires_grad
    assert not dispatched


def test_gradients_of_gradients():
    def function(*tensors):
        return OP(*tensors, 1.5)[0]

    *tensors, _ = leaves()
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)


def test_autocast_is_left_to_the_op(dispatched):
    *tensors, scale = inputs()
    x, w, bias = (each.float() for each in tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = OP(x.requires_grad_(), w, bias, scale)
    assert y.dtype == torch.float32
    assert torch.equal(y, product(x, w, bias, scale)[0])
    assert not dispatched


class Seeing(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Naming(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seeing, Naming])
@pytest.mark.parametrize("make", [inputs, leaves])
def test_modes_see_the_op(mode, make):
    with mode() as active:
        OP(*make())
    assert REGISTERED.default in active.seen


class Named(Tensor):
    pass


def test_subclasses_go_to_the_dispatcher(dispatched):
    x, *rest = inputs()
    y, _ = OP(x.as_subclass(Named), *rest)
    assert type(y) is Named
    assert dispatched


def test_meta_tensors_go_to_the_dispatcher(dispatched):
    *tensors, scale = inputs()
    y, _ = OP(*(each.to("meta") for each in tensors), scale)
    assert y.is_meta
    assert y.shape == (B, N, M)
    assert dispatched


def test_a_lazy_sign_goes_to_the_dispatcher(dispatched):
    x, *rest = inputs()
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    assert torch.equal(OP(negative, *rest)[0], OP(-x, *rest)[0])
    assert len(dispatched) == 1


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traced_graphs_hold_the_op(pre_dispatch):
    *tensors, scale = inputs()
    graph = make_fx(lambda *t: OP(*t, scale), pre_dispatch=pre_dispatch)(*tensors).graph
    assert REGISTERED.default in [node.target for node in graph.nodes]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_scripts_hold_the_op():
    *tensors, scale = inputs()
    traced = torch.jit.trace(lambda *t: OP(*t, scale), tensors)
    assert "primal_attention::test_product" in str(traced.graph)


def test_compiled_graphs_hold_the_op():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda *t: OP(*t, 1.5)[0], backend=keep, fullgraph=True)
    *tensors, scale = leaves()
    assert torch.equal(compiled(*tensors), OP(*tensors, scale)[0])
    (graph,) = graphs
    assert REGISTERED.default in [node.target for node in graph.graph.nodes]


def same_error(call, kind):
    """The op and the dispatcher refuse a call alike."""
    messages = []
    for function in (OP, REGISTERED):
        with pytest.raises(kind) as caught:
            call(function)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_transforms_are_refused_as_by_the_dispatcher():
    x, *rest = inputs()

    def call(function):
        torch.func.grad(lambda x: function(x, *rest)[0].sum())(x)

    same_error(call, RuntimeError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # by the first tangent
@pytest.mark.parametrize("with_gradients", [False, True])
def test_tangents_are_refused_where_no_composition_is_given(with_gradients):
    x, w, *rest = inputs()
    w.requires_grad_(with_gradients)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="test_product has no derivative in forward mode"),
    ):
        OP(forward_ad.make_dual(x, torch.ones_like(x)), w, *rest)


def test_an_op_without_gradients_says_so_when_they_are_asked_for(dispatched):
    y, _ = PLAIN(*leaves())
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        y.sum().backward()
    assert dispatched
    dispatched.clear()
    PLAIN(*inputs())
    assert not dispatched
