"""Layers and inputs of these tests. All sizes are distinct primes, but for D = H C."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention import PrimalAttention, ksvd_loss

H, S, C, B, M, T, N = 2, 3, 5, 7, 11, 19, 23
D = H * C

SELF = {
    "static": {"weights": "static"},
    "static causal": {"weights": "static", "causal": True},
    "sampled": {"weights": "sampled"},
    "dual": {"weights": "dual"},
    "dual causal": {"weights": "dual", "causal": True},
}
CROSS = {"sampled cross": {"weights": "sampled"}, "dual cross": {"weights": "dual"}}
OTHERS = {
    "elu static causal": {"weights": "static", "causal": True, "feature_map": "elu"},
    "exponential sampled": {"weights": "sampled", "feature_map": "exponential"},
    "two maps dual": {"weights": "dual", "feature_map": ("elu", "identity")},
    "e alone": {"weights": "sampled", "scores": "e"},
    "r alone, no bias": {"weights": "dual", "scores": "r", "bias": False},
}
ALL = {**SELF, **CROSS, **OTHERS}


class Inputs(NamedTuple):
    x: Tensor
    context: Tensor | None
    masks: dict[str, Any]

    def run(self, layer):
        return layer(self.x, self.context, **self.masks)

    def tensors(self):
        return [self.x] if self.context is None else [self.x, self.context]


def make_layer(kind="sampled", *, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    sizes = {"samples_per_direction": 5, "max_tokens": M}
    layer = PrimalAttention(D, H, S, **{**sizes, **ALL[kind], **options}).to(dtype)
    with torch.no_grad():
        layer.raw_lambda.normal_()
    return layer


def make_mask(num_tokens, *, empty):
    """Full, holes, in front, at the end, a single token, fewer than landmarks; one empty."""
    mask = torch.rand(B, num_tokens) > 0.3
    mask[0] = True
    mask[1, :4] = False
    mask[2, 7:] = False
    mask[3] = False
    mask[3, 5] = True
    mask[empty] = False
    return mask


def make_inputs(kind="sampled", *, seed=0, masked=True, dtype=torch.float64):
    torch.manual_seed(100 + seed)
    x = torch.randn(B, N, D, dtype=dtype, requires_grad=True)
    masks = {"token_mask": make_mask(N, empty=[4])} if masked else {}
    if kind not in CROSS:
        return Inputs(x, None, masks)
    context = torch.randn(B, T, D, dtype=dtype, requires_grad=True)
    if masked:
        masks["context_mask"] = make_mask(T, empty=[4, 6])
    return Inputs(x, context, masks)


class Stack(nn.Module):
    """Two residual layers, of one kind."""

    def __init__(self, kind, **options):
        super().__init__()
        self.first = make_layer(kind, seed=1, **options)
        self.second = make_layer(kind, seed=2, **options)

    def forward(self, x, context=None, **masks):
        x = x + self.first(x, context, **masks)
        return x + self.second(x, context, **masks)


def loss_of(model, objective):
    return ksvd_loss(model, objective=objective)


def gradients(value, model, inputs=()):
    """Gradients by name, zeros where the value does not depend on a tensor."""
    named = dict(model.named_parameters())
    named |= {f"input {i}": tensor for i, tensor in enumerate(inputs)}
    wanted = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
    grads = torch.autograd.grad(
        value, list(wanted.values()), allow_unused=True, retain_graph=True, materialize_grads=True
    )
    return dict(zip(wanted, grads, strict=True))


def assert_near(actual, expected, tolerance=1e-10):
    """Raise unless both are equal, in units of the largest entry or of 1."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            try:
                assert_near(actual[name], value, tolerance)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
        return
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)
