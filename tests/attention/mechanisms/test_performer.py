"""FAVOR+ against the paper's formula with all pairs, and against performer-pytorch."""

import math
import warnings

import pytest
import torch

from primal_attention.attention.baselines.performer import PerformerAttention
from primal_attention.attention.baselines.softmax import SoftmaxAttention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor


def build(**options):
    torch.manual_seed(0)
    return PerformerAttention(D, H, **options).double().eval()


def published(layer):
    """One head: the kernel matrix of the random features, its rows divided by their sums."""
    directions, eps = layer.feature_map.projection, layer.feature_map.eps

    def features(z):
        rows = []
        for one in z / C**0.25:
            exponents = torch.stack([w @ one - one @ one / 2 for w in directions])
            rows.append((exponents.exp() + eps) / math.sqrt(len(directions)))
        return torch.stack(rows)

    def one_head(q, k, v, head):
        if len(k) == 0:
            return torch.zeros_like(q)
        kernel_matrix = features(q) @ features(k).T
        if layer.causal:
            kernel_matrix = kernel_matrix.tril()
        return kernel_matrix @ v / kernel_matrix.sum(-1, keepdim=True)

    return one_head


@pytest.fixture(scope="module")
def peer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports distutils and old names of torch
        from performer_pytorch import performer_pytorch
    return performer_pytorch


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_paper(causal, mask):
    layer = build(causal=causal)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("context_mask", ["none", "holes", "empty"])
def test_cross_attention_against_the_paper(context_mask):
    layer = build()
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS[context_mask])
    want = by_sequence(layer, published(layer), x, None, context, MASKS[context_mask])
    assert_same_with_gradients(layer, got, want, [x, context])


@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_epsilon_counts_for_queries_and_keys(eps):
    layer = build()
    layer.feature_map.eps = eps
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS["holes"])
    want = by_sequence(layer, published(layer), x, MASKS["holes"])
    assert_same_with_gradients(layer, got, want, [x])


def test_a_query_far_from_all_directions_sees_every_feature_alike():
    """Its exponentials underflow; epsilon is left."""
    layer = build().float()
    k, v = randn(B, N, H, C).float(), randn(B, N, H, C, seed=1).float()
    weights = layer.feature_map(k).sum(-1, keepdim=True)  # of the keys
    want = (weights * v).sum(1, keepdim=True) / weights.sum(1, keepdim=True)
    got = layer.attend(torch.full_like(k, 1e3), k, v, None, None)
    assert_close(got, want.expand_as(got), 1e-5)


def heads_of(layer, x):
    """Queries, keys and values as performer-pytorch takes them, [B, H, N, C]."""
    projections = layer.q_proj, layer.k_proj, layer.v_proj
    return [each(x).unflatten(-1, (H, -1)).transpose(1, 2) for each in projections]


@pytest.mark.parametrize("causal", [False, True])
def test_against_performer_pytorch(peer, causal):
    """Without epsilon its stabilisers cancel, and the results are the same."""
    layer = build(causal=causal)
    layer.feature_map.eps = 0.0
    x = randn(B, N, D)
    q, k, v = heads_of(layer, x)
    phi_q, phi_k = (
        peer.softmax_kernel(
            z, projection_matrix=layer.feature_map.projection, is_query=is_query, eps=0.0
        )
        for z, is_query in ((q, True), (k, False))
    )
    if causal:
        want = peer.causal_linear_attention_noncuda(phi_q, phi_k, v, eps=0.0)
    else:
        want = peer.linear_attention(phi_q, phi_k, v)
    got = layer.attend(*(z.transpose(1, 2) for z in (q, k, v)), None, None)
    assert_close(got, want.transpose(1, 2))


def test_against_performer_pytorch_as_shipped(peer):
    """Its epsilon of 1e-4 behind a stabiliser leaves a difference of that order, ours less."""
    layer = build()
    fast = peer.FastAttention(C, nb_features=layer.feature_map.feature_dim).double()
    fast.projection_matrix.copy_(layer.feature_map.projection)
    q, k, v = heads_of(layer, randn(B, N, D))
    got = layer.attend(*(z.transpose(1, 2) for z in (q, k, v)), None, None)
    difference = (got - fast(q, k, v).transpose(1, 2)).abs().max()
    assert 1e-6 < difference < 1e-2


def test_the_default_number_of_features_is_that_of_performer_pytorch(peer):
    layer = PerformerAttention(192, 3)
    assert layer.feature_map.feature_dim == peer.FastAttention(64).nb_features == 266
    assert PerformerAttention(3, 3).feature_map.feature_dim == 1


def test_more_features_come_nearer_to_softmax():
    """Slowly: the estimate of the kernel has a heavy tail."""
    x = randn(B, N, D)
    errors = []
    for num_features in (16, 256, 16384):
        layer = build(num_features=num_features)
        softmax = SoftmaxAttention(D, H).double()
        softmax.load_state_dict(layer.state_dict(), strict=False)
        errors.append((layer(x) - softmax(x)).square().mean().sqrt().item())
    assert errors[2] < errors[1] / 3 < errors[0] / 3
    assert errors[2] < 5e-3


def test_decoding_with_padding_equals_the_full_pass():
    layer = build(causal=True)
    x, mask = randn(B, N, D), MASKS["holes"]
    want, got, state = layer(x, token_mask=mask), [], layer.init_state(B)
    for piece in (slice(0, 9), slice(9, 10), slice(10, N)):
        y, state = layer.prefill(x[:, piece], state, token_mask=mask[:, piece])
        got.append(y)
    assert_close(torch.cat(got, dim=1), want)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(causal):
    layer = PerformerAttention(D, H, causal=causal)
    sizes = [largest_tensor(layer, num_tokens) for num_tokens in (1024, 2048)]
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 4 * 2048 * 2048 / 8


def test_large_keys_and_queries_are_finite():
    """Queries at the directions themselves have the largest features there can be."""
    layer = PerformerAttention(64, 1).eval()
    z = layer.feature_map.projection[None, :, None] * 64**0.25
    out = layer.attend(z, z, z, None, None)
    assert torch.isfinite(out).all()
    assert (layer.feature_map(z) > 1e8).any(), "or this would show nothing"


def test_features_change_by_redraw_only():
    layer = build()
    before = layer.feature_map.projection.clone()
    layer(randn(B, N, D))
    layer.train()(randn(B, N, D))
    assert layer.feature_map.projection.equal(before)
    layer.redraw()
    assert not layer.feature_map.projection.equal(before)
    assert layer.feature_map.projection.dtype is torch.float64
    assert "feature_map.projection" in layer.state_dict()


def test_a_redraw_does_not_disturb_earlier_graphs():
    x = randn(B, N, D).requires_grad_()
    (want,) = torch.autograd.grad(build()(x).sum(), x)
    layer = build()
    first = layer(x)
    layer.redraw()
    assert not first.equal(layer(x))
    assert_close(torch.autograd.grad(first.sum(), x)[0], want)


def test_errors():
    with pytest.raises(ValueError, match="num_features must be a positive integer, got 0"):
        PerformerAttention(D, H, num_features=0)
    with pytest.raises(ValueError, match="causal=True"):
        PerformerAttention(D, H).init_state(1)
    with pytest.raises(ValueError, match="a context does not go with causal=True"):
        build(causal=True)(randn(B, N, D), randn(B, N, D))
