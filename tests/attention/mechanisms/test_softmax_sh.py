"""Attention-SH and BN+SH against their formulas; where causal, one query at a time."""

import math
from functools import partial
from itertools import pairwise

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
from primal_attention.attention.svr.scaled_heads import (
    KeysAndValues,
    TokenPooling,
    default_scales,
    window_shape,
)

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence

KINDS = {"sh": SoftmaxSHAttention, "bn+sh": SoftmaxBNSHAttention}
POOLS = {"average": lambda z: z.mean(0), "max": lambda z: z.amax(0), "stride": lambda z: z[0]}
SCALES = [4, 1, 2]

kinds = pytest.mark.parametrize("kind", KINDS)


def build(kind="sh", dtype=torch.float64, **options):
    torch.manual_seed(0)
    return KINDS[kind](D, H, **{"scales": SCALES, **options}).to(dtype).eval()


def blocks(z, scale, pool):
    return [POOLS[pool](part) for part in z.split(scale)]


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
    pool, prefix = layer.scaled.pooling.pool, layer.scaled.pooling.num_prefix_tokens

    def pooled(z, scale):
        parts = [*z[:prefix], *(blocks(z[prefix:], scale, pool) if len(z) > prefix else [])]
        return torch.stack(parts) if parts else z

    def seen(z, scale, i):
        """Complete blocks pooled, then the tokens after them one by one."""
        complete = (i + 1) // scale * scale
        parts = blocks(z[:complete], scale, pool) if complete else []
        return torch.stack([*parts, *z[complete : i + 1]])

    def one_head(q, k, v, head):
        scale = layer.scaled.scales[head]
        if not layer.causal:
            return attend(layer, q, pooled(k, scale), pooled(v, scale))
        rows = (attend(layer, q[i], seen(k, scale, i), seen(v, scale, i)) for i in range(len(q)))
        return torch.stack(list(rows))

    return one_head


@kinds
@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("mask", MASKS)
def test_against_the_formula(kind, mask, pool, causal):
    layer = build(kind, pool=pool, causal=causal)
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


@kinds
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_prefix_tokens_stay_as_they_are(kind, mask):
    layer = build(kind, num_prefix_tokens=2)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    assert_same_with_gradients(layer, got, by_sequence(layer, literal(layer), x, MASKS[mask]), [x])


# Identities


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize(
    ("kind", "plain"), [("sh", SoftmaxAttention), ("bn+sh", SoftmaxBNAttention)]
)
def test_scales_of_one_change_nothing(kind, plain, mask, causal):
    layer = build(kind, scales=[1] * H, causal=causal)
    other = plain(D, H, causal=causal).double()
    other.load_state_dict(layer.state_dict())
    x, token_mask = randn(B, N, D), MASKS[mask]
    assert torch.equal(layer(x, token_mask=token_mask), other(x, token_mask=token_mask))


@pytest.mark.parametrize("pool", ["average", "stride"])
def test_pooling_the_input_equals_pooling_the_keys(pool):
    layer, x = build(), randn(B, N, D)
    pooling = TokenPooling(pool)
    tokens = pooling(KeysAndValues(x[:, :, None], x[:, :, None], None), 4).k[:, :, 0]
    for projection in (layer.k_proj, layer.v_proj):
        projected = projection(x)[:, :, None]
        after = pooling(KeysAndValues(projected, projected, None), 4).k[:, :, 0]
        assert_close(projection(tokens), after, 1e-14)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_shorter_than_a_scale(causal):
    layer, x = build(scales=[8, 64, 5], causal=causal), randn(B, 3, D)
    got = layer(x)
    assert_close(got, by_sequence(layer, literal(layer), x))
    if not causal:  # one pooled key: all queries read the mean of the values
        assert_close(got, layer.out_proj(layer.v_proj(x).mean(1, keepdim=True)).expand_as(got))


def test_default_scales():
    assert [default_scales(n) for n in (1, 2, 3, 4)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
    assert default_scales(8) == [1, 1, 2, 2, 4, 4, 8, 8]
    assert SoftmaxSHAttention(16, 8).scaled.scales == default_scales(8)


# Images


def test_windows_are_as_square_as_they_can_be():
    assert [window_shape(r) for r in (1, 2, 4, 8)] == [(1, 1), (1, 2), (2, 2), (2, 4)]


@pytest.mark.parametrize("pool", ["average", "max"])
@pytest.mark.parametrize("grid", [(4, 8), (5, 7)], ids=["even", "ragged"])
def test_images_are_pooled_in_two_dimensions(grid, pool):
    rows, columns = grid
    tokens = randn(B, 1 + rows * columns, H, C)
    pooled = TokenPooling(pool, grid, 1)(KeysAndValues(tokens, tokens, None), 8)
    image = tokens[:, 1:].flatten(2).mT.unflatten(-1, grid)
    average = partial(F.avg_pool2d, count_include_pad=False)
    pool_2d = average if pool == "average" else F.max_pool2d
    want = pool_2d(image, kernel_size=(2, 4), ceil_mode=True)
    want = want.flatten(2).mT.unflatten(-1, (H, C))
    assert pooled.mask is None
    assert_close(pooled.k, torch.cat([tokens[:, :1], want], dim=1), 1e-12)
    assert torch.equal(pooled.k, pooled.v)


@kinds
@pytest.mark.parametrize("pool", POOLS)
def test_masked_patches_of_an_image_do_not_exist(kind, pool):
    grid = (4, 6)
    layer = build(kind, grid=grid, num_prefix_tokens=1, pool=pool)
    x = randn(B, 25, D)
    mask = torch.rand(B, 25, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 0] = True
    mask[:, [1, 2, 7, 8]] = False  # a window without a real patch
    got = layer(x, token_mask=mask)
    other = torch.where(mask[..., None], x, math.nan)
    assert torch.equal(layer(other, token_mask=mask), got)
    assert_close(layer(x, token_mask=torch.ones_like(mask)), layer(x), 1e-12)
    pooled = layer.scaled.pooling(KeysAndValues(x[:, :, None], x[:, :, None], mask), 4)
    assert pooled.mask.shape == (B, 1 + 6) and not pooled.mask[:, 1].any()
    if pool == "average":
        window = torch.tensor([3, 4, 9, 10])
        want = [x[b, window[mask[b, window]]].mean(0) for b in range(B) if pooled.mask[b, 2]]
        assert_close(pooled.k[pooled.mask[:, 2], 2, 0], torch.stack(want))


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


def test_one_call_for_each_scale(calls):
    SoftmaxSHAttention(12, 6, scales=[4, 1, 2, 1, 4, 4])(torch.randn(2, 16, 12))
    assert [(q.shape[1], k.shape[2]) for q, k, _ in calls] == [(2, 16), (1, 8), (3, 4)]


# Causal


@kinds
@pytest.mark.parametrize("t", [1, 9, N - 1])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_the_future_changes_nothing(kind, t, mask):
    layer, token_mask = build(kind, causal=True), MASKS[mask]
    x = randn(B, N, D)
    want = layer(x, token_mask=token_mask)[:, :t]
    other = torch.cat([x[:, :t], 100 * randn(B, N - t, D, seed=1)], dim=1)
    assert_close(layer(other, token_mask=token_mask)[:, :t], want, 1e-13)
    short = None if token_mask is None else token_mask[:, :t]
    assert_close(layer(x[:, :t], token_mask=short), want, 1e-12)


@kinds
@pytest.mark.parametrize("mask", ["none", "padded", "holes"])
@pytest.mark.parametrize("pool", POOLS)
def test_decoding_equals_the_full_pass(kind, mask, pool):
    layer, token_mask = build(kind, causal=True, pool=pool), MASKS[mask]
    x = randn(B, N, D)
    state, outputs = layer.init_state(B), []
    for start, stop in pairwise((0, 1, 2, 3, 9, 10, N)):
        part = None if token_mask is None else token_mask[:, start:stop]
        y, state = layer.prefill(x[:, start:stop], state, token_mask=part)
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), layer(x, token_mask=token_mask), 1e-12)


# Precision, contract, errors


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(kind, dtype, causal):
    layer, low = (build(kind, one, causal=causal) for one in (torch.float32, dtype))
    x = randn(B, 64, D, dtype=torch.float32)
    torch.testing.assert_close(low(x.to(dtype)).float(), layer(x), rtol=0.05, atol=0.05)


@kinds
def test_bad_values_are_named(kind):
    bad = {
        "scales must .* 3 heads, got .1, 2.": {"scales": [1, 2]},
        "scales.1. must .* got 0": {"scales": [1, 0, 2]},
        "scales.2. must .* got 1.5": {"scales": [1, 2, 1.5]},
        "pool must .* got 'mean'": {"pool": "mean"},
        "grid must .* got .4,": {"grid": (4,)},
        "grid.0. must .* got 0": {"grid": (0, 4)},
        "num_prefix_tokens must .* got -1": {"num_prefix_tokens": -1},
        "grid=.2, 2. .* causal=True": {"grid": (2, 2), "causal": True},
        "num_prefix_tokens=1 .* causal=True": {"num_prefix_tokens": 1, "causal": True},
    }
    for message, options in bad.items():
        with pytest.raises(ValueError, match=message):
            KINDS[kind](D, H, **options)
    layer = KINDS[kind](D, H, grid=(4, 4), num_prefix_tokens=1)
    with pytest.raises(ValueError, match="needs 17 keys, got 16"):
        layer(torch.randn(2, 16, D))
    assert "scales=[1, 2, 4]" in repr(layer)
