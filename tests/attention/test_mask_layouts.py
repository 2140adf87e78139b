"""Masks of any strides act as contiguous ones with the same values."""

import pytest
import torch

from primal_attention import ATTENTIONS, PrimalAttention, build_attention

B, N, D, H = 3, 8, 16, 2


def masks(batch, length):
    """Masks [batch, length] in all layouts that slicing, broadcasting and transposing give."""
    lengths = torch.arange(length - batch, length)
    positions = torch.arange(length)
    yield "sequence first", (positions[:, None] < lengths).t()
    yield "broadcast", (positions < length - 2)[None].expand(batch, length)
    yield "one length each", (lengths % 2 == 0)[:, None].expand(batch, length)
    wide = torch.arange(2 * length) < 2 * lengths[:, None]
    yield "every second column", wide[:, ::2]
    yield "part of a longer one", torch.cat([wide[:, :1], wide], 1)[:, 1 : length + 1]
    yield "every second row", (positions < lengths.repeat_interleave(2)[:, None])[::2]


def outputs_and_gradients(layer, x, **inputs):
    torch.manual_seed(1)
    out = layer(x, **inputs)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
    tensors = [x, *layer.parameters()]
    return [out, *torch.autograd.grad(loss, tensors, allow_unused=True)]


def check(layer, shape):
    torch.manual_seed(2)
    dtype = next(layer.parameters()).dtype
    x = torch.randn(*shape, dtype=dtype, requires_grad=True)
    context = torch.randn(*shape, dtype=dtype)
    crosses = layer.mechanism.cross and not layer.causal
    crosses = crosses and getattr(layer, "weights", None) != "static"
    for name, mask in masks(*shape[:2]):
        given = [{"token_mask": mask}]
        if crosses:
            given.append({"token_mask": mask, "context": context, "context_mask": mask})
        for inputs in given:
            plain = {key: value.contiguous() for key, value in inputs.items()}
            found = outputs_and_gradients(layer, x, **inputs)
            for one, other in zip(found, outputs_and_gradients(layer, x, **plain), strict=True):
                if other is not None:
                    torch.testing.assert_close(one, other, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_mechanism(name, causal, training):
    if causal and not ATTENTIONS[name].mechanism.causal:
        return
    torch.manual_seed(0)
    options = {"weights": "dual"} if causal and name == "primal" else {}
    if name in ("cosformer", "linformer"):
        options["max_tokens"] = 16
    layer = build_attention(name, D, H, causal=causal, **options).double()
    check(layer.train(training), (B, N, D))


@pytest.mark.parametrize("feature_map", ["cosine", "elu"])
@pytest.mark.parametrize(
    ("weights", "causal"),
    [("sampled", False), ("static", False), ("static", True), ("dual", False), ("dual", True)],
)
def test_large_primal_layers(weights, causal, feature_map):
    torch.manual_seed(0)
    options = {"weights": weights, "causal": causal, "feature_map": feature_map}
    check(PrimalAttention(128, 4, 8, **options), (2, 512, 128))
