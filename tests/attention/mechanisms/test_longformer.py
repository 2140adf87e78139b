"""Windows and global tokens against their definition, and against transformers."""

import types
import warnings

import pytest
import torch

from primal_attention.attention.baselines.longformer import LongformerAttention
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import largest_tensor

SHAPES = [(2, 0), (6, 1), (4, 3), (10, 7), (44, 2), (512, 1), (4, 40)]


def build(**options):
    torch.manual_seed(0)
    return LongformerAttention(D, H, **options).double().eval()


def sees(layer, i, j):
    """Return whether token i sees token j, from the paper's figure 2 (d)."""
    is_global = j < layer.num_global_tokens
    if layer.causal:
        return j <= i and (i - j <= layer.window or is_global)
    return abs(i - j) <= layer.window // 2 or is_global


def one_sequence(layer, x):
    """The outputs [n, D] of real tokens x [n, D], one query at a time."""
    local = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    rows = []
    for i in range(len(x)):
        q, k, v = local
        seen = [j for j in range(len(x)) if sees(layer, i, j)]
        if not layer.causal and i < layer.num_global_tokens:
            q, k, v = layer.q_global(x), layer.k_global(x), layer.v_global(x)
            seen = list(range(len(x)))
        heads = []
        for h in range(H):
            at = slice(h * C, (h + 1) * C)
            weights = (k[seen][:, at] @ q[i, at] / C**0.5).softmax(0)
            heads.append(weights @ v[seen][:, at])
        rows.append(torch.cat(heads))
    return layer.out_proj(torch.stack(rows))


def dense(layer, x, mask):
    rows = []
    for b in range(len(x)):
        real = torch.ones(x.shape[1], dtype=torch.bool) if mask is None else mask[b]
        row = torch.zeros_like(x[b])
        if real.any():
            row = row.index_put((real.nonzero()[:, 0],), one_sequence(layer, x[b][real]))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("window", "num_global_tokens"), SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_paper(causal, window, num_global_tokens, mask):
    layer = build(window=window, num_global_tokens=num_global_tokens, causal=causal)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = dense(layer, x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("causal", [False, True])
def test_a_wide_window_is_softmax_attention(causal):
    layer = build(window=2 * N, num_global_tokens=0, causal=causal)
    softmax = SoftmaxAttention(D, H, causal=causal).double()
    softmax.load_state_dict(layer.state_dict())
    x = randn(B, N, D)
    assert_close(layer(x, token_mask=MASKS["holes"]), softmax(x, token_mask=MASKS["holes"]), 1e-13)


@pytest.mark.parametrize("num_global_tokens", [0, 1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_against_transformers(num_global_tokens, padded):
    """Lengths that are multiples of the window; its softmax is in float32, hence the bound."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
    config = types.SimpleNamespace(
        hidden_size=D,
        num_attention_heads=H,
        attention_probs_dropout_prob=0.0,
        attention_window=[6],
    )
    peer = LongformerSelfAttention(config, 0).double().eval()
    layer = build(window=6, num_global_tokens=num_global_tokens)
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    if num_global_tokens:
        names |= {"q_global": "query_global", "k_global": "key_global", "v_global": "value_global"}
    for ours, theirs in names.items():
        getattr(peer, theirs).load_state_dict(getattr(layer, ours).state_dict())
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(D))
        layer.out_proj.bias.zero_()
    x = randn(B, 24, D)
    mask = torch.ones(B, 24, dtype=torch.bool)
    if padded:
        mask[1, 17:] = False
    is_global = torch.zeros_like(mask)
    is_global[:, :num_global_tokens] = True
    want = peer(
        torch.where(mask[:, :, None], x, 0.0),
        attention_mask=torch.where(mask, 10000.0 * is_global, -10000.0),
        is_index_masked=~mask,
        is_index_global_attn=is_global,
        is_global_attn=num_global_tokens > 0,
    )[0]
    got = layer(x, token_mask=mask)
    assert_close(got[mask], want[mask], 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_contract(causal):
    report = check_attention(
        lambda: LongformerAttention(D, H, window=6, num_global_tokens=2, causal=causal),
        causal=causal,
    )
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == {"cross-attention"} | (set() if causal else {"causality", "decoding"})


@pytest.mark.parametrize(("window", "num_global_tokens"), SHAPES)
def test_decoding_with_padding_equals_the_full_pass(window, num_global_tokens):
    layer = build(window=window, num_global_tokens=num_global_tokens, causal=True)
    x, mask = randn(B, N, D), MASKS["holes"]
    want, got, state = layer(x, token_mask=mask), [], layer.init_state(B)
    for piece in (slice(0, 1), slice(1, 4), slice(4, 15), slice(15, 16), slice(16, N)):
        y, state = layer.prefill(x[:, piece], state, token_mask=mask[:, piece])
        got.append(y)
    assert_close(torch.cat(got, dim=1), want)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_linear(causal):
    layer = LongformerAttention(D, H, window=16, num_global_tokens=2, causal=causal)
    sizes = [largest_tensor(layer, num_tokens) for num_tokens in (1024, 2048)]
    assert sizes[1] <= 2.05 * sizes[0]
    assert sizes[1] < 4 * 2048 * 2048 / 4


def test_the_causal_form_has_no_global_projections():
    assert not hasattr(build(causal=True), "q_global")
    assert not hasattr(build(num_global_tokens=0), "q_global")
    assert hasattr(build(), "q_global")


def test_errors():
    with pytest.raises(ValueError, match="window must be even, got 3"):
        LongformerAttention(D, H, window=3)
    with pytest.raises(ValueError, match="window must be a positive integer, got 0"):
        LongformerAttention(D, H, window=0)
    with pytest.raises(ValueError, match="num_global_tokens must be 0 or more, got -1"):
        LongformerAttention(D, H, num_global_tokens=-1)
    with pytest.raises(ValueError, match="LongformerAttention has no cross-attention"):
        build()(randn(B, N, D), randn(B, N, D))
    with pytest.raises(ValueError, match="causal=True"):
        build().init_state(B)
    assert "window=512, num_global_tokens=1" in repr(build())
