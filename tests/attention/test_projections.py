"""Projections are modules: one graph, autocast, and whatever is done to them acts."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from primal_attention import PrimalAttention, ksvd_loss

B, N, D, H, S = 2, 11, 15, 3, 5


class Doubled(nn.Linear):
    """Stand in for an adapter or a quantised layer: a module that is no nn.Linear."""

    def forward(self, x):
        return 2 * super().forward(x)


def layer_and_tokens(**options):
    torch.manual_seed(0)
    layer = PrimalAttention(D, H, S, max_tokens=N, **options).double().train()
    return layer, torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)


def step(layer, x, **masks):
    """Outputs, and gradients of the tokens and parameters."""
    y = layer(x, **masks)
    loss = y.square().sum() + 0.1 * ksvd_loss(layer)
    parameters = [x, *layer.parameters()]
    return [y, *torch.autograd.grad(loss, parameters, materialize_grads=True)]


KINDS = {
    "sampled": {"weights": "sampled"},
    "static": {"weights": "static"},
    "causal": {"weights": "static", "causal": True},
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_graph(kind):
    """The compiler takes the layer as a whole, with the values of the layer itself."""
    layer, x = layer_and_tokens(**KINDS[kind])
    expected = step(layer, x)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    loss = y.square().sum() + 0.1 * ksvd_loss(layer)
    parameters = [x, *layer.parameters()]
    actual = [y, *torch.autograd.grad(loss, parameters, materialize_grads=True)]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_that_is_not_a_number(kind):
    layer, x = layer_and_tokens(**KINDS[kind])
    mask = torch.arange(N) < torch.tensor([[N], [N - 4]])
    bad = torch.where(mask[:, :, None], x.detach(), float("nan")).requires_grad_()
    for one, other in zip(
        step(layer, bad, token_mask=mask), step(layer, x, token_mask=mask), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind):
    """The projections have the dtype of autocast, the sums float32."""
    layer, x = layer_and_tokens(**KINDS[kind])
    layer, x = layer.float(), x.detach().float().requires_grad_()
    expected = step(layer, x)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        loss = y.float().square().sum() + 0.1 * ksvd_loss(layer)
    parameters = [x, *layer.parameters()]
    grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
    assert y.dtype == torch.bfloat16
    for one, other in zip([y, *grads], expected, strict=True):
        assert (one - other).norm() < 0.1 * other.norm()


@pytest.mark.parametrize("training", [True, False])
def test_under_autocast_a_module_gets_the_tokens_as_they_are(training):
    """It may have been made for their dtype, as a quantised one is for float32."""
    layer, x = layer_and_tokens(weights="dual")
    seen = []
    layer.k_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        layer.float()(x.float())
    assert seen == [torch.float32]


def with_hook(layer):
    layer.k_proj.register_forward_hook(lambda module, args, output: 2 * output)


def with_pre_hook(layer):
    layer.k_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with torch.no_grad():
        layer.k_proj.bias.mul_(2)


def with_another_class(layer):
    projection = Doubled(D, D).double()
    projection.load_state_dict(layer.k_proj.state_dict())
    layer.k_proj = projection


def with_another_forward(layer):
    forward = layer.k_proj.forward
    layer.k_proj.forward = lambda x: 2 * forward(x)


def with_parametrisation(layer):
    with torch.no_grad():
        for parameter in layer.k_proj.parameters():
            parameter.mul_(2)
    parametrizations.weight_norm(layer.k_proj)


@pytest.mark.parametrize(
    "change",
    [with_hook, with_pre_hook, with_another_class, with_another_forward, with_parametrisation],
)
def test_what_is_done_to_a_projection_is_honoured(change):
    """Each change doubles the keys, which the identity map shows."""
    layer, x = layer_and_tokens(feature_map="identity", scores="r", weights="static")
    before = layer(x) - layer(torch.zeros_like(x))
    change(layer)
    after = layer(x) - layer(torch.zeros_like(x))
    torch.testing.assert_close(after, 2 * before)


def test_backward_hooks_are_run():
    layer, x = layer_and_tokens()
    seen = []
    layer.q_proj.register_full_backward_hook(lambda *_: seen.append("q"))
    layer(x).sum().backward()
    assert seen == ["q"]
