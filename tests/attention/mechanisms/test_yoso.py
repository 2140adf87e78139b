"""YOSO: the expectation and the hashed estimate, against the paper and transformers."""

import math
import warnings

import pytest
import torch

from primal_attention.attention.baselines import yoso
from primal_attention.attention.baselines.yoso import YosoAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import YosoConfig
    from transformers.models.yoso.modeling_yoso import YosoSelfAttention

TAU = 4
ESTIMATORS = ["expectation", "hashes"]


def build(**options):
    torch.manual_seed(0)
    options = {"num_bits": TAU, "num_hashes": 7} | options
    return YosoAttention(D, H, **options).double().eval()


class Collisions(torch.autograd.Function):
    """Weights [N, T] of the products of queries and keys, with the lower bound as derivative."""

    @staticmethod
    def forward(ctx, product, weights):
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        return grad * TAU / 2 * ctx.saved_tensors[0], None


def weights_of(layer, q, k, head):
    if layer.estimator == "expectation":
        return (1 - torch.acos(q @ k.T) / math.pi) ** TAU
    count = torch.zeros(len(q), len(k), dtype=q.dtype)
    for planes in layer.planes[:, head]:
        q_bits, k_bits = q @ planes > 0, k @ planes > 0
        count += (q_bits[:, None] == k_bits[None]).all(-1)
    return count / len(layer.planes)


def published(layer):
    def one_head(q, k, v, head):
        q, k = (z / z.norm(dim=-1, keepdim=True) for z in (q, k))
        weights = weights_of(layer, q.detach(), k.detach(), head)
        out = Collisions.apply(q @ k.T, weights) @ v
        norm = out.norm(dim=-1, keepdim=True)
        return out / torch.where(norm > 0, norm, 1.0)

    return one_head


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_against_the_paper(estimator, mask):
    layer = build(estimator=estimator)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_cross_attention_against_the_paper(estimator):
    layer = build(estimator=estimator)
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS["holes"])
    want = by_sequence(layer, published(layer), x, None, context, MASKS["holes"])
    assert_same_with_gradients(layer, got, want, [x, context])


def test_the_products_are_summed_in_pieces(monkeypatch):
    layer = build(estimator="hashes")
    x = randn(B, N, D).requires_grad_()
    (whole,) = torch.autograd.grad(layer(x).sum(), x)
    monkeypatch.setitem(yoso._ELEMENTS, "cpu", 2 * B * N * D)
    (pieces,) = torch.autograd.grad(layer(x).sum(), x)
    assert_close(pieces, whole)


def test_many_hashes_come_near_the_expectation():
    """The share of R hashes has a standard deviation of at most 1 / (2 sqrt(R))."""
    layer = build(estimator="hashes", num_hashes=4000)
    q, k = (z / z.norm(dim=-1, keepdim=True) for z in (randn(N, C), randn(N, C, seed=1)))
    share = weights_of(layer, q, k, 0)
    expected = (1 - torch.acos(q @ k.T) / math.pi) ** TAU
    assert (share - expected).abs().max() < 5 * 0.5 / math.sqrt(4000)
    x = randn(B, N, D)
    exact = build()
    exact.load_state_dict(layer.state_dict(), strict=False)
    assert (layer(x) - exact(x)).norm() < 0.05 * exact(x).norm()


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


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["zero", "equal", "opposite"])
def test_gradients_are_finite_where_arccos_has_none(kind, estimator):
    layer = build(estimator=estimator)
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


def test_contract_of_the_hashes():
    report = check_attention(lambda: YosoAttention(12, 2, estimator="hashes", num_hashes=4))
    assert report["cross-attention"].status is Status.PASSED
    assert report["autocast"].status is Status.EXEMPT


def test_hashes_take_linear_memory(monkeypatch):
    """Outside the op the largest tensor grows linearly; inside, products come in pieces."""
    layer = YosoAttention(12, 2, estimator="hashes", num_hashes=2, num_bits=3)
    assert largest_tensor(layer, 2048) <= 4 * largest_tensor(layer, 512)
    summed, bucket_sums = [], yoso._bucket_sums

    def recorded(z, *args):
        summed.append(z.numel())
        return bucket_sums(z, *args)

    monkeypatch.setitem(yoso._ELEMENTS, "cpu", 2 * 512 * 12)
    monkeypatch.setattr(yoso, "_bucket_sums", recorded)
    layer(torch.randn(1, 512, 12)).sum().backward()
    assert max(summed) == 2 * 512 * 12


def test_planes_are_drawn_in_training_only():
    layer, x = build(estimator="hashes"), randn(B, N, D)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))
    assert "planes" in layer.state_dict()
    assert "planes" not in build().state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "YosoAttention has no causal form"),
        ({"estimator": "mean"}, "estimator must be one of 'expectation', 'hashes', got 'mean'"),
        ({"num_hashes": 0}, "num_hashes must be a positive integer, got 0"),
        ({"num_bits": 16}, "num_bits must be at most 15, got 16"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        YosoAttention(D, H, **options)
