"""Derivatives of all mechanisms: the same by every way that PyTorch has of taking them.

The inputs are made from other tensors, and from one another, as those of a layer inside a network.
"""

import pytest
import torch
from torch import nn

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
    for with_graph, without in zip(gradients(function, tensors, create_graph=True), plain):
        torch.testing.assert_close(with_graph, without, rtol=1e-9, atol=1e-11)
    if not differences:
        return
    directions = [randn(*x.shape, seed=3) for x in tensors]
    exact = sum((d * t).sum() for d, t in zip(plain, directions))
    torch.testing.assert_close(
        difference(function, tensors, directions), exact.detach(), rtol=1e-5, atol=1e-7
    )


def difference(function, tensors, directions, step=1e-6):
    """The central difference of a function of tensors, which are moved and put back."""
    values, starts = [], [x.detach().clone() for x in tensors]
    for move in (step, -step, 0.0):
        with torch.no_grad():
            for x, start, t in zip(tensors, starts, directions, strict=True):
                x.copy_(start + move * t)
        values.append(function().detach())
    return (values[0] - values[1]) / (2 * step)


def inputs_of(network):
    """An input, and all that has a gradient."""
    x = randn(B, N, D).requires_grad_()
    return x, [x, *network.parameters()]


HAS_OTHER_GRADIENTS = {"yoso"}  # a lower bound of the derivative, as published


@EVERY_LAYER
def test_first_order_gradients_are_one(name, causal, options):
    for network in networks(build(name, causal, **options), causal):
        x, tensors = inputs_of(network)
        check_first_order(
            lambda: (network(x) * randn(B, N, D)).sum(),
            tensors,
            differences=name not in HAS_OTHER_GRADIENTS,
        )


@pytest.mark.parametrize("objective", ["zero", "released", "released_batch", "explained_energy"])
@pytest.mark.parametrize(("weights", "causal"), WEIGHTS)
def test_gradients_of_objectives_are_one(weights, causal, objective):
    layer = build("primal", causal, weights=weights).train()
    for network in networks(layer, causal):
        x, tensors = inputs_of(network)

        def loss():
            out = network(x)
            return out.square().sum() + ksvd_loss(layer, objective=objective)

        check_first_order(loss, tensors)


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
