"""Attention-SH and BN+SH against their formulas."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.attention.svr.key_norm import FEWEST_KEYS
from primal_attention.attention.svr.mechanisms import (
    SoftmaxBNAttention,
    SoftmaxBNSHAttention,
    SoftmaxSHAttention,
)
from primal_attention.attention.svr.scaled_heads import KeysAndValues, default_scales, pooled

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence

KINDS = {"sh": SoftmaxSHAttention, "bn+sh": SoftmaxBNSHAttention}
SCALES = [4, 1, 2]

kinds = pytest.mark.parametrize("kind", KINDS)


def build(kind="sh", dtype=torch.float64, **options):
    torch.manual_seed(0)
    return KINDS[kind](D, H, **{"scales": SCALES, **options}).to(dtype).eval()


def attend(layer, q, k, v):
    """Queries [n, C] over keys that are pooled already; normalised, for BN+SH."""
    if len(k) == 0:
        return torch.zeros_like(q)
    if isinstance(layer, SoftmaxBNSHAttention):
        deviation = (k.var(0, correction=0) + layer.norm.eps).sqrt()
        deviation = deviation if len(k) >= FEWEST_KEYS else 1
        q, k = ((z - layer.norm.beta * k.mean(0)) / deviation for z in (q, k))
    return (q @ k.T / math.sqrt(C)).softmax(-1) @ v


def literal(layer):
    def means(z, scale):
        return torch.stack([part.mean(0) for part in z.split(scale)]) if len(z) else z

    def one_head(q, k, v, head):
        scale = layer.scales[head]
        return attend(layer, q, means(k, scale), means(v, scale))

    return one_head


@kinds
@pytest.mark.parametrize("mask", MASKS)
def test_against_the_formula(kind, mask):
    layer = build(kind)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@kinds
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_cross_attention_pools_the_context(kind, mask):
    layer = build(kind)
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer), x, None, context, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x, context])


# Identities


@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize(
    ("kind", "plain"), [("sh", SoftmaxAttention), ("bn+sh", SoftmaxBNAttention)]
)
def test_scales_of_one_change_nothing(kind, plain, mask):
    layer = build(kind, scales=[1] * H)
    other = plain(D, H).double()
    other.load_state_dict(layer.state_dict())
    x, token_mask = randn(B, N, D), MASKS[mask]
    assert torch.equal(layer(x, token_mask=token_mask), other(x, token_mask=token_mask))


def test_pooling_the_input_equals_pooling_the_keys():
    layer, x = build(), randn(B, N, D)
    tokens = pooled(KeysAndValues(x[:, :, None], x[:, :, None], None), 4).k[:, :, 0]
    for projection in (layer.k_proj, layer.v_proj):
        projected = projection(x)[:, :, None]
        after = pooled(KeysAndValues(projected, projected, None), 4).k[:, :, 0]
        assert_close(projection(tokens), after, 1e-14)


def test_sequences_shorter_than_a_scale():
    layer, x = build(scales=[8, 64, 5]), randn(B, 3, D)
    got = layer(x)
    assert_close(got, by_sequence(layer, literal(layer), x))
    # one pooled key: all queries read the mean of the values
    assert_close(got, layer.out_proj(layer.v_proj(x).mean(1, keepdim=True)).expand_as(got))


def test_default_scales():
    assert [default_scales(n) for n in (1, 2, 3, 4)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
    assert default_scales(8) == [1, 1, 2, 2, 4, 4, 8, 8]
    assert SoftmaxSHAttention(16, 8).scales == default_scales(8)


# Cost


@pytest.fixture
def calls(monkeypatch):
    """Queries, keys and values of all calls of the fused attention."""
    seen = []
    sdpa = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        "scaled_dot_product_attention",
        lambda *qkv, **options: seen.append(qkv) or sdpa(*qkv, **options),
    )
    return seen


@kinds
@pytest.mark.parametrize("num_heads", [2, 4, 8])
def test_scores_cost_the_mean_of_the_inverse_scales(kind, num_heads, calls):
    x, flops, sizes = randn(2, 64, 32, dtype=torch.float32), [], []
    for layer in (SoftmaxAttention(32, num_heads), KINDS[kind](32, num_heads)):
        calls.clear()
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            layer(x)
        flops.append(counter.get_flop_counts()["Global"][torch.ops.aten.bmm])
        sizes.append(sum(k.nbytes + v.nbytes for _, k, v in calls))
    fraction = sum(1 / scale for scale in default_scales(num_heads)) / num_heads
    assert flops[1] / flops[0] == fraction
    assert sizes[1] / sizes[0] == fraction


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_backends_of_the_caller_are_kept():
    """Check pooled keys too, for which the layer itself leaves out cuDNN."""
    layer, x = SoftmaxSHAttention(32, 4).cuda(), torch.randn(2, 64, 32, device="cuda")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(x)
    ops = counter.get_flop_counts()["Global"]
    assert {op for op in ops if "attention" in str(op)} == set()
    assert torch.ops.aten.bmm in ops


def test_one_call_for_neighbouring_heads_of_equal_scale(calls):
    SoftmaxSHAttention(12, 6, scales=[1, 1, 4, 4, 4, 2])(torch.randn(2, 16, 12))
    assert [(q.shape[1], k.shape[2]) for q, k, _ in calls] == [(2, 16), (3, 4), (1, 8)]


# Precision, contract, errors


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind, dtype):
    layer, low = (build(kind, one) for one in (torch.float32, dtype))
    x = randn(B, 64, D, dtype=torch.float32)
    torch.testing.assert_close(low(x.to(dtype)).float(), layer(x), rtol=0.05, atol=0.05)


@kinds
def test_bad_values_are_named(kind):
    bad = {
        "scales must .* 3 heads, got .1, 2.": {"scales": [1, 2]},
        "scales.1. must .* got 0": {"scales": [1, 0, 2]},
        "scales.2. must .* got 1.5": {"scales": [1, 2, 1.5]},
        "causal=True: .* has no causal form": {"causal": True},
    }
    for message, options in bad.items():
        with pytest.raises(ValueError, match=message):
            KINDS[kind](D, H, **options)
    assert "scales=[1, 2, 4]" in repr(KINDS[kind](D, H))
