"""All projections in one product of matrices, or by the modules where these must be called."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.feature_maps import FeatureMap

B, N, D, H, S = 2, 11, 15, 3, 5


class Doubled(nn.Linear):
    """What an adapter or a quantised layer is to us: something else than nn.Linear."""

    def forward(self, x):
        return 2 * super().forward(x)


class Halved(FeatureMap):
    """A map that no op knows."""

    def __init__(self):
        super().__init__()
        self.head_dim = self.feature_dim = D // H

    def forward(self, z):
        return z / 2


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


def calls(layer, x):
    """How often a projection of the tokens was called as a module."""
    count = []
    forward = nn.Linear.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.Linear, "forward", lambda self, x: (count.append(self), forward(self, x))[1]
        )
        layer(x)
    return sum(module not in (layer.out_proj, layer.score_proj) for module in count)


KINDS = {
    "sampled": {"weights": "sampled"},
    "static": {"weights": "static"},
    "causal": {"weights": "static", "causal": True},
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scores", ["both", "e"])
@pytest.mark.parametrize("feature_map", ["cosine", ("elu", "relu")])
def test_packed_and_apart_agree(kind, scores, bias, feature_map):
    options = {"scores": scores, "bias": bias, "feature_map": feature_map}
    layer, x = layer_and_tokens(**KINDS[kind], **options)
    mask = torch.arange(N) < torch.tensor([[N], [N - 4]])
    assert calls(layer, x) == 0
    packed = step(layer, x, token_mask=mask)
    layer.q_proj.register_forward_hook(lambda *_: None)
    assert calls(layer, x) == (3 if "dual" in kind else 2)
    for one, other in zip(packed, step(layer, x, token_mask=mask), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_with_a_context():
    layer, x = layer_and_tokens()
    context = torch.randn(B, N + 2, D, dtype=torch.float64)
    packed = step(layer, x, context=context)
    layer.k_proj.register_forward_hook(lambda *_: None)
    for one, other in zip(packed, step(layer, x, context=context), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


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
        assert calls(layer, x) == 0
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


@pytest.mark.parametrize("name", ["q_proj", "h_proj"])
def test_hooks_of_any_dual_projection_are_honoured(name):
    layer, x = layer_and_tokens(weights="dual")
    getattr(layer, name).register_forward_hook(lambda *_: None)
    assert calls(layer, x) == 3


def test_a_layer_without_an_op_for_it():
    layer, x = layer_and_tokens(feature_map=Halved())
    assert calls(layer, x) == 2


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


def test_without_gradients_the_modules_are_called():
    layer, x = layer_and_tokens()
    with torch.no_grad():
        assert calls(layer, x) == 2


def test_projections_of_different_kinds_are_called():
    layer, x = layer_and_tokens()
    layer.k_proj.bias = None
    assert calls(layer, x) == 2
