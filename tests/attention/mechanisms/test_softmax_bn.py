"""Attention-BN against its formula, in which queries and keys are both normalised."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from primal_attention.attention.baselines.softmax import SoftmaxAttention, softmax_attention
from primal_attention.attention.svr.key_norm import (
    FEWEST_KEYS,
    KeyMoments,
    KeyNorm,
    key_moments,
    running_key_moments,
)
from primal_attention.attention.svr.mechanisms import SoftmaxBNAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence

OPTIONS = {
    "default": {},
    "beta": {"beta": 0.3, "eps": 1e-2},
    "centred only": {"rescale": False},
    "learnable": {"learnable_beta": True, "beta": 0.5},
}


def build(dtype=torch.float64, **options):
    torch.manual_seed(0)
    layer = SoftmaxBNAttention(D, H, **options).to(dtype).eval()
    if isinstance(layer.norm.beta, torch.nn.Parameter):
        layer.norm.beta.data = torch.linspace(0.2, 1.3, H, dtype=dtype)  # each head its own
    return layer


def normalised(norm, head, k, *points):
    """Each of the points by mean and variance of the keys k [n, C], as the paper writes it."""
    beta = norm.beta if isinstance(norm.beta, float) else norm.beta[head]
    mean, variance = k.mean(0), k.var(0, correction=0)
    deviation = (variance + norm.eps).sqrt()
    if not norm.rescale or len(k) < FEWEST_KEYS:
        deviation = torch.ones_like(deviation)
    return [(z - beta * mean) / deviation for z in points]


def literal(layer):
    def attend(q, k, v, head, keys):
        q, k = normalised(layer.norm, head, keys, q, k)
        return (q @ k.T / math.sqrt(C)).softmax(-1) @ v

    def one_head(q, k, v, head):
        if len(k) == 0:
            return torch.zeros_like(q)
        if not layer.causal:
            return attend(q, k, v, head, k)
        rows = [attend(q[i], k[: i + 1], v[: i + 1], head, k[: i + 1]) for i in range(len(q))]
        return torch.stack(rows)

    return one_head


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_the_formula(options, mask, causal):
    layer = build(causal=causal, **OPTIONS[options])
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer), x, MASKS[mask])
    assert_close(got, want, 1e-12)
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("mask", ["none", "holes"])
def test_statistics_of_cross_attention_are_those_of_the_context(mask):
    layer = build()
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer), x, None, context, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x, context])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_without_mean_and_scale_it_is_softmax_attention(dtype, causal, mask):
    layer = build(dtype, beta=0.0, rescale=False, causal=causal)
    softmax = SoftmaxAttention(D, H, causal=causal).to(dtype)
    softmax.load_state_dict(layer.state_dict())
    x = randn(B, N, D, dtype=dtype)
    assert torch.equal(layer(x, token_mask=MASKS[mask]), softmax(x, token_mask=MASKS[mask]))


def test_it_is_softmax_attention_with_a_bias_of_each_key():
    layer = build(beta=0.8)
    q, k, v = (randn(B, N, H, C, seed=seed) for seed in range(3))
    mean, variance = k.mean(1, keepdim=True), k.var(1, correction=0, keepdim=True) + 1e-5
    bias = -(0.8 * mean / variance * k).sum(-1) / math.sqrt(C)  # [B, N, H]
    q, k, v, bias = (z.transpose(1, 2) for z in (q / variance, k, v, bias))
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, :, None])
    args = (randn(B, N, H, C, seed=seed) for seed in range(3))
    assert_close(layer.attend(*args, None, None), want.transpose(1, 2), 1e-12)


def test_no_joint_change_of_units_or_origin_changes_the_outputs():
    layer = build(eps=1e-30)
    q, k, v = (randn(B, N, H, C, seed=seed) for seed in range(3))
    factor, shift = randn(H, C, seed=3).exp(), 5 * randn(H, C, seed=4)
    want = layer.attend(q, k, v, None, None)
    assert_close(layer.attend(factor * q + shift, factor * k + shift, v, None, None), want, 1e-11)
    shifted = layer.attend(q, k + shift, v, None, None)  # softmax attention would not notice
    assert (shifted - want).abs().max() > 0.1


@pytest.mark.parametrize("t", [1, 9, N - 1])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_causal_statistics_show_no_future(t, mask):
    layer = build(causal=True)
    x = randn(B, N, D)
    other = torch.cat([x[:, :t], 100 * randn(B, N - t, D, seed=1)], dim=1)
    want = layer(x, token_mask=MASKS[mask])[:, :t]
    assert_close(layer(other, token_mask=MASKS[mask])[:, :t], want, 1e-13)


def test_statistics_of_the_whole_sequence_would_show_the_future():
    norm, t = KeyNorm(H), 9
    q, k, v = (randn(B, N, H, C, seed=seed) for seed in range(3))
    later = torch.cat([k[:, :t], k[:, t:] + 3], dim=1)
    outputs = [
        softmax_attention(norm(q, key_moments(keys, None)), keys, v, causal=True)[:, :t]
        for keys in (k, later)
    ]
    assert (outputs[0] - outputs[1]).abs().max() > 0.1


# Moments of the keys


@pytest.mark.parametrize("mask", MASKS)
def test_running_moments_are_those_of_the_keys_so_far(mask):
    k, token_mask = randn(B, N, H, C), MASKS[mask]
    running = running_key_moments(k, token_mask)
    for t in range(N):
        so_far = None if token_mask is None else token_mask[:, : t + 1]
        want = key_moments(k[:, : t + 1], so_far)
        assert_close(KeyMoments(*(m[:, t : t + 1] for m in running)), want, 1e-12)


def test_running_variance_keeps_its_digits_where_the_mean_is_large():
    k = 1000 + randn(1, 4096, 1, 8)
    want = running_key_moments(k, None).variance[:, 8:]
    got = running_key_moments(k.float(), None).variance[:, 8:]
    counts = torch.arange(1, 4097)[8:, None, None]
    sums = [z.cumsum(1)[:, 8:] / counts for z in (k.float(), k.float().square())]
    difference = sums[1] - sums[0].square()
    assert ((got - want).abs() / want).max() < 1e-3
    assert (
        (difference - want).abs() / want
    ).max() > 0.1  # what the state (n, sum, sum of squares) gives


def test_too_few_keys_are_centred_and_not_rescaled():
    norm = KeyNorm(H)
    k = randn(B, 3, H, C)
    q = randn(B, N, H, C, seed=1)
    moments = key_moments(k, None)
    assert_close(norm(q, moments), q - k.mean(1, keepdim=True), 1e-12)
    more = key_moments(randn(B, FEWEST_KEYS, H, C), None)
    assert_close(norm(q, more), (q - more.mean) / (more.variance + 1e-5), 1e-12)


# Decoding, options, precision


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mask", ["none", "padded", "holes"])
def test_decoding_equals_the_full_pass(options, mask):
    layer = build(causal=True, **OPTIONS[options])
    x, token_mask = randn(B, N, D), MASKS[mask]
    want = layer(x, token_mask=token_mask)
    state, outputs = layer.init_state(B), []
    for start, stop in pairwise((0, 1, 2, 9, N)):
        part = None if token_mask is None else token_mask[:, start:stop]
        y, state = layer.prefill(x[:, start:stop], state, token_mask=part)
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), want, 1e-12)


def test_state_in_bfloat16_is_wide():
    layer = build(torch.bfloat16, causal=True)
    _, state = layer.step(randn(B, D, dtype=torch.bfloat16), layer.init_state(B))
    assert {value.dtype for value in state} == {torch.float32}


def test_beta_can_be_annealed_and_learned():
    layer = build(beta=0.0, rescale=False)
    layer.norm.beta = 0.3
    x = randn(B, N, D)
    assert torch.equal(layer(x), build(beta=0.3, rescale=False)(x))
    learnable = build(learnable_beta=True)
    learnable(x).square().sum().backward()
    assert learnable.norm.beta.shape == (H,)
    assert (learnable.norm.beta.grad.abs() > 0).all()
    assert "norm.beta" in learnable.state_dict() and "norm.beta" not in layer.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(dtype, causal):
    layer, low = build(torch.float32, causal=causal), build(dtype, causal=causal)
    x = randn(B, 64, D, dtype=torch.float32)
    torch.testing.assert_close(low(x.to(dtype)).float(), layer(x), rtol=0.05, atol=0.05)
    constant = x[:, :1].expand_as(x).to(dtype).requires_grad_()
    out = low(constant)  # the variance is zero: 1 / eps is beyond the range of float16
    out.sum().backward()
    assert out.isfinite().all() and constant.grad.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_contract_of_a_learnable_beta(causal):
    report = check_attention(
        lambda: SoftmaxBNAttention(D, H, causal=causal, **OPTIONS["learnable"]), causal=causal
    )
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == ({"cross-attention"} if causal else {"causality", "decoding"}), str(report)
    assert "any sequence length" in report["export"].detail


def test_bad_values_are_named():
    for eps in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"eps .* got {eps}"):
            SoftmaxBNAttention(D, H, eps=eps)
    with pytest.raises(ValueError, match=r"beta .* got inf"):
        SoftmaxBNAttention(D, H, beta=math.inf)
    with pytest.raises(ValueError, match=r"causal=True"):
        SoftmaxBNAttention(D, H).init_state(2)
    with pytest.raises(TypeError, match="betta"):
        SoftmaxBNAttention(D, H, betta=1.0)
    assert "beta=1.0" in repr(SoftmaxBNAttention(D, H))
