"""YOSO-E against the paper and transformers."""

import math
import warnings

import pytest
import torch

from primal_attention.attention.baselines.yoso import YosoAttention

from ..dense import MASKS, B, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import YosoConfig
    from transformers.models.yoso.modeling_yoso import YosoSelfAttention

TAU = 4


def build():
    torch.manual_seed(0)
    return YosoAttention(D, H, num_bits=TAU).double().eval()


class Collisions(torch.autograd.Function):
    """Weights [N, T] of the products of queries and keys, with the lower bound as derivative."""

    @staticmethod
    def forward(ctx, product, weights):
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        return grad * TAU / 2 * ctx.saved_tensors[0], None


def published(layer):
    def one_head(q, k, v, head):
        q, k = (z / z.norm(dim=-1, keepdim=True) for z in (q, k))
        weights = (1 - torch.acos(q.detach() @ k.detach().T) / math.pi) ** TAU
        out = Collisions.apply(q @ k.T, weights) @ v
        norm = out.norm(dim=-1, keepdim=True)
        return out / torch.where(norm > 0, norm, 1.0)

    return one_head


@pytest.mark.parametrize("mask", MASKS)
def test_against_the_paper(mask):
    layer = build()
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


def test_cross_attention_against_the_paper():
    layer = build()
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS["holes"])
    want = by_sequence(layer, published(layer), x, None, context, MASKS["holes"])
    assert_same_with_gradients(layer, got, want, [x, context])


@pytest.mark.parametrize("mask", ["none", "holes"])
def test_against_transformers(mask):
    """Its expectation, without the convolution of the values; its mask is 0 or -10,000."""
    layer = build()
    config = YosoConfig(
        hidden_size=D,
        num_attention_heads=H,
        use_expectation=True,
        hash_code_len=TAU,
        conv_window=None,
        attention_probs_dropout_prob=0.0,
    )
    other = YosoSelfAttention(config).double().eval()
    pairs = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    for ours, theirs in pairs.items():
        getattr(other, theirs).load_state_dict(getattr(layer, ours).state_dict())
    real = torch.ones(B, N, dtype=torch.bool) if MASKS[mask] is None else MASKS[mask]
    additive = torch.where(real, 0.0, -10_000.0)
    x, other_x = (randn(B, N, D).requires_grad_() for _ in range(2))
    got = layer(x, token_mask=MASKS[mask])
    want = layer.out_proj(other(other_x, additive)[0]) * real[..., None]
    assert_close(got, want)
    cotangent = randn(B, N, D, seed=3) * real[..., None]
    got.backward(cotangent)
    want.backward(cotangent)
    assert_close(x.grad, other_x.grad)
    for ours, theirs in pairs.items():
        assert_close(getattr(layer, ours).weight.grad, getattr(other, theirs).weight.grad)


@pytest.mark.parametrize("kind", ["zero", "equal", "opposite"])
def test_gradients_are_finite_where_arccos_has_none(kind):
    layer = build()
    layer.k_proj.load_state_dict(layer.q_proj.state_dict())
    with torch.no_grad():
        if kind == "opposite":
            layer.k_proj.weight.neg_()
            layer.k_proj.bias.neg_()
    x = randn(1, 1, D).expand(B, N, D).clone() * (kind != "zero")
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "YosoAttention has no causal form"),
        ({"num_bits": 0}, "num_bits must be a positive integer, got 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        YosoAttention(D, H, **options)
