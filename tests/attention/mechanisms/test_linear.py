"""Linear attention and its BN form against the sums over all pairs of tokens."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from primal_attention.attention.baselines.linear import LinearAttention
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.attention.svr.key_norm import FEWEST_KEYS
from primal_attention.attention.svr.mechanisms import LinearBNAttention
from primal_attention.feature_maps import ExponentialFeatureMap
from primal_attention.ops.op import chunk_elements
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

MAPS = {"elu": lambda z: F.elu(z) + 1, "relu": F.relu}
BN_OPTIONS = {
    "default": {},
    "beta": {"beta": 0.3, "eps": 1e-2},
    "centred only": {"rescale": False},
    "learnable": {"learnable_beta": True, "beta": 0.5},
}


@pytest.fixture(autouse=True)
def short_chunks():
    """The scan crosses several chunks; a prefill starts in the middle of one."""
    with chunk_elements(1):
        yield


def build(kind=LinearAttention, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return kind(D, H, **options).to(dtype).eval()


def literal(layer, phi_q=MAPS["elu"], phi_k=None):
    """Kernel values of all pairs, normalised by their sums; 0 where a sum is 0."""

    def one_head(q, k, v, head):
        if len(k) == 0:
            return torch.zeros_like(q)
        if isinstance(layer, LinearBNAttention):
            norm = layer.norm
            beta = norm.beta if isinstance(norm.beta, float) else norm.beta[head]
            deviation = (k.var(0, correction=0) + norm.eps).sqrt()
            if not norm.rescale or len(k) < FEWEST_KEYS:
                deviation = 1
            q, k = ((z - beta * k.mean(0)) / deviation for z in (q, k))
        kernel_matrix = phi_q(q) @ (phi_k or phi_q)(k).T
        kernel_matrix = kernel_matrix.tril() if layer.causal else kernel_matrix
        total = kernel_matrix.sum(-1, keepdim=True)
        return kernel_matrix / torch.where(total == 0, 1, total) @ v

    return one_head


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MAPS)
def test_against_the_formula(name, mask, causal):
    layer = build(feature_map=name, causal=causal)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer, MAPS[name]), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", [LinearAttention, LinearBNAttention])
def test_scaled_heads_against_the_formula(kind, mask):
    scales = [3, 1, 5][:H]
    options = {"learnable_beta": True, "beta": 0.5} if kind is LinearBNAttention else {}
    layer = build(kind, scales=scales, **options)
    plain = literal(layer)

    def pooled(q, k, v, head):
        k, v = (
            torch.stack([w.mean(0) for w in z.split(scales[head])]) if len(z) else z for z in (k, v)
        )
        return plain(q, k, v, head)

    x = randn(B, N, D).requires_grad_()
    want = by_sequence(layer, pooled, x, MASKS[mask])
    assert_same_with_gradients(layer, layer(x, token_mask=MASKS[mask]), want, [x])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", BN_OPTIONS)
def test_batch_norm_against_the_formula(options, mask):
    layer = build(LinearBNAttention, **BN_OPTIONS[options])
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("kind", [LinearAttention, LinearBNAttention])
@pytest.mark.parametrize("mask", ["none", "holes", "empty"])
def test_cross_attention(kind, mask):
    layer = build(kind)
    x, context = randn(B, 7, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS[mask])
    want = by_sequence(layer, literal(layer), x, None, context, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x, context])


def test_batch_norm_without_mean_and_scale_is_linear_attention():
    layer = build(LinearBNAttention, beta=0.0, rescale=False)
    x = randn(B, N, D)
    linear, softmax = build(), SoftmaxAttention(D, H).double()
    for other in (linear, softmax):  # the parameters have the same names
        other.load_state_dict(layer.state_dict())
    assert_close(layer(x), linear(x), 1e-12)
    folded = build(LinearBNAttention)(x)
    assert (folded - layer(x)).abs().max() > 1e-3


@pytest.mark.parametrize("causal", [False, True])
def test_maps_that_are_modules_and_pairs(causal):
    torch.manual_seed(1)
    feature_map = ExponentialFeatureMap(C, 11).double()
    layer = build(feature_map=feature_map, causal=causal)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS["holes"])
    want = by_sequence(layer, literal(layer, feature_map), x, MASKS["holes"])
    assert_same_with_gradients(layer, got, want, [x])
    pair = build(feature_map=("relu", "elu"), causal=causal)
    want = by_sequence(pair, literal(pair, MAPS["relu"], MAPS["elu"]), x, None)
    assert_same_with_gradients(pair, pair(x), want, [x])


@pytest.mark.parametrize("name", ["elu", "exponential"])
@pytest.mark.parametrize("mask", ["none", "padded", "holes"])
def test_decoding_equals_the_full_pass(name, mask):
    layer, token_mask = build(feature_map=name, causal=True), MASKS[mask]
    x = randn(B, N, D)
    state, outputs = layer.init_state(B), []
    for start, stop in pairwise((0, 1, 2, 9, N)):
        part = None if token_mask is None else token_mask[:, start:stop]
        y, state = layer.prefill(x[:, start:stop], state, token_mask=part)
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), layer(x, token_mask=token_mask), 1e-12)
    assert state.kv.shape == (B, H, layer.features.feature_dim, C)


# Numbers


@pytest.mark.parametrize("causal", [False, True])
def test_a_normaliser_of_zero_gives_zero(causal):
    layer = build(feature_map="relu", causal=causal, bias=False)
    q, k, v = -randn(B, N, H, C).abs(), randn(B, N, H, C, seed=1), randn(B, N, H, C, seed=2)
    q.requires_grad_()
    out = layer.attend(q, k, v, None, None)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(q.grad, torch.zeros_like(q))


@pytest.mark.parametrize("causal", [False, True])
def test_features_of_a_query_do_not_underflow(causal):
    layer = build(causal=causal)
    q, k, v = -randn(B, N, H, C).abs(), randn(B, N, H, C, seed=1), randn(B, N, H, C, seed=2)
    want = layer.attend(q, k, v, None, None)
    far = (q.float() - 500).requires_grad_()  # exp(-500) is 0 in float32
    got = layer.attend(far, k.float(), v.float(), None, None)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)
    got.sum().backward()
    assert far.grad.isfinite().all() and far.grad.abs().max() > 1e-3


@pytest.mark.parametrize("kind", [LinearAttention, LinearBNAttention])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind, dtype):
    layer, low = build(kind, torch.float32), build(kind, dtype)
    x = randn(B, 64, D, dtype=torch.float32)
    torch.testing.assert_close(low(x.to(dtype)).float(), layer(x), rtol=0.05, atol=0.05)
    constant = x[:, :1].expand_as(x).to(dtype)
    assert low(constant).isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(causal):
    layer = LinearAttention(D, H, causal=causal)
    assert largest_tensor(layer, 2048) == 2 * largest_tensor(layer, 1024)


FORMS = {
    "linear exponential": (LinearAttention, {"feature_map": "exponential"}),
    "linear scaled": (LinearAttention, {"scales": [1, 4, 4]}),
    "linear_bn scaled": (LinearBNAttention, {"scales": [1, 4, 4]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_contract(form):
    kind, options = FORMS[form]
    report = check_attention(lambda: kind(D, H, **options))
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == {"causality", "decoding"}, str(report)
    assert "any sequence length" in report["export"].detail


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"causal=True: .* do not factorise"):
        LinearBNAttention(D, H, causal=True)
    with pytest.raises(ValueError, match=r"scales=\[1, 2, 4\] .* causal=True"):
        LinearAttention(D, H, scales=[1, 2, 4], causal=True)
    with pytest.raises(ValueError, match=r"scales must have one entry .* got \[1, 2\]"):
        LinearBNAttention(D, H, scales=[1, 2])
    with pytest.raises(ValueError, match=r"feature_map .* got 'gelu'"):
        LinearAttention(D, H, feature_map="gelu")
    with pytest.raises(ValueError, match=r"eps .* got 0"):
        LinearBNAttention(D, H, eps=0.0)
    with pytest.raises(ValueError, match="causal=True"):
        LinearAttention(D, H).init_state(2)
