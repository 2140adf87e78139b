"""Derivatives of all mechanisms: the same by every way that PyTorch has of taking them.

The inputs are made from other tensors, and from one another, as those of a layer inside a network.
"""

import re

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from primal_attention import ATTENTIONS, PrimalAttention, build_attention, ksvd_loss

B, N, T, D, H = 2, 7, 5, 8, 2
MASK = torch.tensor([[True] * N, [False, True, True, True, False, True, False]])
CONTEXT_MASK = torch.tensor([[True, True, False, True, True], [True] * T])
FEATURE_MAPS = ("cosine", "elu", "relu", "identity", "exponential", ("cosine", "elu"))
WEIGHTS = (("sampled", False), ("static", False), ("static", True), ("dual", False), ("dual", True))


def build(name, causal, **options):
    torch.manual_seed(0)
    if name == "primal":
        default = "dual" if causal else "sampled"
        options = {"num_directions": 3, "weights": default, **options}
    if name in ("cosformer", "linformer"):
        options["max_tokens"] = 16
    return build_attention(name, D, H, causal=causal, **options).double().eval()


def layers():
    """All mechanisms, causal and not, and the variants of Primal-Attention."""
    for name in ATTENTIONS:
        for causal in (False, True):
            if not causal or ATTENTIONS[name].mechanism.causal:
                yield pytest.param(name, causal, {}, id=f"{name}{'-causal' * causal}")
    for weights, causal in WEIGHTS:
        for feature_map in FEATURE_MAPS:
            for scores in ("both", "r"):
                options = {"weights": weights, "feature_map": feature_map, "scores": scores}
                words = "primal", weights, *("causal",) * causal, str(feature_map), scores
                yield pytest.param("primal", causal, options, id="-".join(words))


# Forward-mode AD of torch imports its own deprecated decompositions.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
EVERY_LAYER = pytest.mark.parametrize(("name", "causal", "options"), list(layers()))


class Network(nn.Module):
    """A layer whose input and context are made from one tensor, before other operations."""

    def __init__(self, layer, *, context=False, masked=False):
        super().__init__()
        self.before, self.layer = nn.Linear(D, D).double(), layer
        self.context = context
        self.masks = {}
        if masked:
            self.masks["token_mask"] = MASK
            if context:
                self.masks["context_mask"] = CONTEXT_MASK

    def forward(self, x):
        torch.manual_seed(1)  # for mechanisms that draw numbers
        y = self.before(x).tanh()
        given = {"context": y[:, :T].sin()} if self.context else {}
        return self.layer(y, **given, **self.masks).cos()


def networks(layer, causal):
    """The layer in all ways in which it takes its inputs."""
    crosses = layer.mechanism.cross and not causal
    if isinstance(layer, PrimalAttention):
        crosses = crosses and layer.weights != "static"
    for context in (False, True) if crosses else (False,):
        for masked in (False, True):
            yield Network(layer, context=context, masked=masked)


def randn(*shape, seed=2):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def gradients(function, tensors, **options):
    found = torch.autograd.grad(function(), tensors, allow_unused=True, **options)
    return [torch.zeros_like(x) if d is None else d for x, d in zip(tensors, found, strict=True)]


def check_first_order(function, tensors, *, differences=True):
    """Gradients with and without a graph, and a directional derivative by finite differences."""
    plain = gradients(function, tensors)
    assert_same(gradients(function, tensors, create_graph=True), plain)
    if not differences:
        return
    directions = [randn(*x.shape, seed=3) for x in tensors]
    exact = inner(plain, directions)
    torch.testing.assert_close(
        difference(function, tensors, directions), exact.detach(), rtol=1e-5, atol=1e-7
    )


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def inner(left, right):
    return sum((a * b).sum() for a, b in zip(left, right, strict=True))


def difference(function, tensors, directions, step=1e-6):
    """The central difference of a function of tensors, which are moved and put back."""
    values, starts = [], [x.detach().clone() for x in tensors]
    for move in (step, -step, 0.0):
        with torch.no_grad():
            for x, start, t in zip(tensors, starts, directions, strict=True):
                x.copy_(start + move * t)
        values.append(function().detach())
    return (values[0] - values[1]) / (2 * step)


def loss_of(network):
    """A loss of a network, and the tensors that it depends on."""
    x, weights = randn(B, N, D).requires_grad_(), randn(B, N, D, seed=4)
    return lambda: (network(x) * weights).sum(), [x, *network.parameters()]


HAS_OTHER_GRADIENTS = {"yoso"}  # a lower bound of the derivative, as published


@EVERY_LAYER
def test_first_order_gradients_are_one(name, causal, options):
    for network in networks(build(name, causal, **options), causal):
        check_first_order(*loss_of(network), differences=name not in HAS_OTHER_GRADIENTS)


@pytest.mark.parametrize("objective", ["zero", "released", "released_batch", "explained_energy"])
@pytest.mark.parametrize(("weights", "causal"), WEIGHTS)
def test_gradients_of_objectives_are_one(weights, causal, objective):
    layer = build("primal", causal, weights=weights).train()
    for network in networks(layer, causal):
        loss, tensors = loss_of(network)
        check_first_order(lambda f=loss: f() + ksvd_loss(layer, objective=objective), tensors)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize(("weights", "causal"), WEIGHTS)
def test_gradients_of_packed_sequences_are_one(weights, causal, feature_map):
    layer = build("primal", causal, weights=weights, feature_map=feature_map)
    before, bounds = nn.Linear(D, D).double(), torch.tensor([0, 4, 4, 11])
    x = randn(11, D).requires_grad_()
    tensors = [x, *before.parameters(), *layer.parameters()]
    check_first_order(
        lambda: (layer(before(x).tanh(), cu_seqlens=bounds) * randn(11, D)).sum(), tensors
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("primal", {"weights": weights, "feature_map": feature_map})
        for weights in ("static", "dual")
        for feature_map in FEATURE_MAPS
    ]
    + [(name, {}) for name in ("linear", "performer", "cosformer", "flow")],
)
def test_gradients_through_a_state_are_one(name, options):
    layer = build(name, True, **options)
    x = randn(B, N, D).requires_grad_()

    def loss():
        y, state = layer.prefill(x[:, :3].sin())
        z, _ = layer.prefill(x[:, 3:], state)
        return (torch.cat([y, z], 1) * randn(B, N, D)).sum()

    check_first_order(loss, [x, *layer.parameters()])


@EVERY_LAYER
def test_forward_mode_is_the_transpose_of_reverse_mode(name, causal, options):
    for network in networks(build(name, causal, **options), causal):
        x, t = randn(B, N, D), randn(B, N, D, seed=3)
        out, tangent = torch.func.jvp(network, (x,), (t,))
        y, pull_back = torch.func.vjp(network, x)
        d_out = randn(*y.shape, seed=4)
        torch.testing.assert_close(out, y)
        leaf = x.clone().requires_grad_()
        (d_x,) = torch.autograd.grad(network(leaf), leaf, d_out)
        assert tangent.norm() > 1e-6
        assert_same([inner([tangent], [d_out]), pull_back(d_out)[0]], [inner([t], [d_x]), d_x])
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        assert_same([dual_tangent(network, x, t)], [tangent])
        with torch.no_grad():
            assert_same([torch.func.jvp(network, (x,), (t,))[1]], [tangent])
        for parameter in network.parameters():
            parameter.requires_grad_()


def dual_tangent(function, x, t):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, t))).tangent


@EVERY_LAYER
def test_transforms_of_torch_func(name, causal, options):
    network = Network(build(name, causal, **options))
    x, t = randn(B, N, D), randn(B, N, D, seed=3)

    def loss(x):
        return network(x).square().sum()

    def gradient(x):
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(loss(leaf), leaf)[0]

    plain = gradient(x)
    assert_same([torch.func.grad(loss)(x)], [plain])
    each = torch.func.vmap(torch.func.grad(lambda sequence: loss(sequence[None])), **RANDOM)(x)
    assert_same([each], [plain])
    assert_same([torch.func.vmap(lambda z: network(z[None])[0], **RANDOM)(x)], [network(x)])
    product = torch.func.jvp(torch.func.grad(loss), (x,), (t,))[1]
    if name not in HAS_OTHER_GRADIENTS:
        moved = [gradient(x + step * t) for step in (1e-5, -1e-5)]
        torch.testing.assert_close((moved[0] - moved[1]) / 2e-5, product, rtol=1e-4, atol=1e-6)


RANDOM = {"randomness": "same"}


@pytest.mark.parametrize(("weights", "causal"), WEIGHTS)
@pytest.mark.parametrize("objective", ["zero", "released", "released_batch", "explained_energy"])
def test_forward_mode_through_objectives(weights, causal, objective):
    layer = build("primal", causal, weights=weights).train()

    def loss(x):
        layer(x)
        return ksvd_loss(layer, objective=objective)

    x, t = randn(B, N, D), randn(B, N, D, seed=3)
    leaf = x.clone().requires_grad_()
    (d_x,) = torch.autograd.grad(loss(leaf), leaf)
    assert_same([torch.func.jvp(loss, (x,), (t,))[1]], [inner([t], [d_x])])


def test_jacobians_and_hessians():
    for weights, causal in WEIGHTS:
        layer, x = build("primal", causal, weights=weights), randn(1, 3, D)
        by_rows = torch.autograd.functional.jacobian(layer, x)
        assert by_rows.norm() > 0.1
        for jacobian in (torch.func.jacfwd(layer), torch.func.jacrev(layer)):
            assert_same([jacobian(x)], [by_rows])
        assert_same([torch.autograd.functional.jacobian(layer, x, vectorize=True)], [by_rows])

        def loss(x, layer=layer):
            return layer(x).square().sum()

        by_rows = torch.autograd.functional.hessian(loss, x)
        assert_same([torch.func.hessian(loss)(x)], [by_rows])


@pytest.mark.parametrize("causal", [False, True])
def test_forward_mode_of_a_large_layer(causal):
    torch.manual_seed(0)
    layer = PrimalAttention(128, 4, 8, weights="static", causal=causal)
    x, t, d_out = (torch.randn(2, 512, 128) for _ in range(3))
    leaf = x.clone().requires_grad_()
    (d_x,) = torch.autograd.grad(layer(leaf), leaf, d_out)
    tangent = torch.func.jvp(layer, (x,), (t,))[1]
    torch.testing.assert_close((tangent * d_out).sum(), (t * d_x).sum(), rtol=1e-3, atol=1e-3)


NO_SECOND_DERIVATIVES = "derivative for aten::.* is not implemented"  # of the fused softmax


@EVERY_LAYER
def test_second_derivatives_are_finite_at_zero_vectors(name, causal, options):
    layer = build(name, causal, **options, bias=False)
    x = randn(B, N, D)
    x[1, 2] = 0.0
    for masked in (False, True):
        masks = {"token_mask": MASK} if masked else {}
        torch.manual_seed(1)
        given = x.clone().requires_grad_()
        tensors = [given, *layer.parameters()]
        try:
            loss = layer(given, **masks).square().sum()
            first = gradients(lambda f=loss: f, tensors, create_graph=True)
            second = gradients(lambda g=first: inner(g, g), tensors)
        except RuntimeError as error:
            assert re.search(NO_SECOND_DERIVATIVES, str(error))
            continue
        for each in (*first, *second):
            assert torch.isfinite(each).all()
