"""The strided pattern against its definition.

No other implementation is installed as a package; with stride 1, or one beyond the sequence, all
tokens are seen, and the result is softmax attention.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.attention.baselines.sparse import SparseAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

STRIDES = [1, 3, 11, 128]


def build(**options):
    torch.manual_seed(0)
    return SparseAttention(D, H, **options).double().eval()


def subset(layer, i, length):
    """A_i as a set: the two subsets of section 4.2, and what lies before i where causal."""
    first = {j for j in range(length) if abs(i - j) <= layer.stride}
    second = {j for j in range(length) if (i - j) % layer.stride == 0}
    seen = first | second
    return sorted(j for j in seen if j <= i) if layer.causal else sorted(seen)


def published(layer):
    def one_head(q, k, v, head):
        rows = []
        for i in range(len(q)):
            seen = subset(layer, i, len(k))
            rows.append((k[seen] @ q[i] / C**0.5).softmax(0) @ v[seen])
        return torch.stack(rows)

    return one_head


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("causal", [False, True])
def test_against_the_paper(causal, stride, mask):
    layer = build(causal=causal, stride=stride)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("stride", [1, N, 1000])
def test_all_tokens_are_seen_with_these_strides(causal, stride):
    layer = build(causal=causal, stride=stride)
    softmax = SoftmaxAttention(D, H, causal=causal).double()
    softmax.load_state_dict(layer.state_dict())
    x = randn(B, N, D)
    assert_close(layer(x, token_mask=MASKS["holes"]), softmax(x, token_mask=MASKS["holes"]), 1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_contract(causal):
    report = check_attention(lambda: SparseAttention(D, H, stride=3, causal=causal), causal=causal)
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == {"cross-attention"} | (set() if causal else {"causality", "decoding"})


@pytest.mark.parametrize("stride", STRIDES)
def test_decoding_with_padding_equals_the_full_pass(stride):
    layer = build(causal=True, stride=stride)
    x, mask = randn(B, N, D), MASKS["holes"]
    want, got, state = layer(x, token_mask=mask), [], layer.init_state(B)
    for piece in (slice(0, 4), slice(4, 15), slice(15, 16), slice(16, N)):
        y, state = layer.prefill(x[:, piece], state, token_mask=mask[:, piece])
        got.append(y)
    assert_close(torch.cat(got, dim=1), want)


@pytest.mark.parametrize("causal", [False, True])
def test_no_tensor_has_the_size_of_all_pairs(causal):
    layer = SparseAttention(D, H, stride=45, causal=causal)
    assert largest_tensor(layer, 2025) < 4 * H * 2025 * 2025 / 8


def test_the_cost_grows_with_the_power_three_halves():
    """Beyond the projections, which are linear."""
    costs = []
    for stride in (16, 32):
        layer = SparseAttention(D, H, stride=stride)
        q = torch.randn(1, stride * stride, H, C)
        with FlopCounterMode(display=False) as counter:
            layer.attend(q, q, q, None, None)
        costs.append(counter.get_total_flops())
    assert costs[1] == 8 * costs[0]


def test_errors():
    with pytest.raises(ValueError, match="stride must be a positive integer, got 0"):
        SparseAttention(D, H, stride=0)
    with pytest.raises(ValueError, match="SparseAttention has no cross-attention"):
        build()(randn(B, N, D), randn(B, N, D))
    with pytest.raises(ValueError, match="causal=True"):
        build().init_state(B)
    assert "stride=128" in repr(SparseAttention(D, H))
