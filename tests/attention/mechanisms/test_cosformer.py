"""cosFormer against the paper's formula, one pair of tokens at a time.

No other implementation is installed as a package.
"""

import math

import pytest
import torch

from primal_attention.attention.baselines.cosformer import CosformerAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

FORMS = {
    "its own length": {},
    "a fixed length": {"max_tokens": 31},
    "causal": {"causal": True, "max_tokens": 31},
}


def build(**options):
    torch.manual_seed(0)
    return CosformerAttention(D, H, **options).double().eval()


def published(layer):
    """One head: s_ij of all pairs, eq. (10), row by row over its sum."""

    def one_head(q, k, v, head):
        m = layer.max_tokens or max(len(q), len(k))
        rows = []
        for i in range(len(q)):
            total, out = torch.zeros(()).double(), torch.zeros_like(q[0])
            for j in range(i + 1 if layer.causal else len(k)):
                s = q[i].relu() @ k[j].relu() * math.cos(math.pi / 2 * (i - j) / m)
                total, out = total + s, out + s * v[j]
            rows.append(out / total.clamp(min=1e-6))
        return torch.stack(rows)

    return one_head


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_against_the_paper(form, mask):
    layer = build(**FORMS[form])
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("form", ["its own length", "a fixed length"])
@pytest.mark.parametrize(("num_x", "context_mask"), [(7, "none"), (7, "holes"), (29, "empty")])
def test_cross_attention_against_the_paper(form, num_x, context_mask):
    layer = build(**FORMS[form])
    x, context = randn(B, num_x, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS[context_mask])
    want = by_sequence(layer, published(layer), x, None, context, MASKS[context_mask])
    assert_same_with_gradients(layer, got, want, [x, context])


def test_weights_are_not_negative_even_at_the_full_distance():
    layer = CosformerAttention(D, H, max_tokens=N)
    ones = torch.ones(1, N, H, D // H)
    first = torch.zeros_like(ones)
    first[:, 0] = 1.0
    out = layer.attend(ones, ones, first, None, None)  # the weight of the first token
    assert (out >= 0).all()
    assert (out[0, 1:, 0, 0] < out[0, :-1, 0, 0]).all()


def test_contract_of_a_fixed_length():
    """The registry builds the other two forms."""
    report = check_attention(lambda: CosformerAttention(D, H, max_tokens=150))
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == {"autocast", "causality", "decoding"}
    assert report["autocast"].status is Status.EXEMPT


def test_autocast_moves_gradients_at_the_kink_of_relu_only():
    """The reason of the exemption: outputs are near, gradients are not; without relu both are."""

    def errors():
        runs = []
        for low in (True, False):
            x = randn(B, N, D, dtype=torch.float32).requires_grad_()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
                y = layer(x)
            (grad,) = torch.autograd.grad(y.float(), x, randn(B, N, D, seed=1).float())
            runs.append((y.float(), grad))
        return [((a - b).norm() / b.norm()).item() for a, b in zip(*runs, strict=True)]

    layer = build().float()
    output, gradient = errors()
    assert output < 0.01
    assert gradient < 0.1
    with torch.no_grad():
        layer.q_proj.bias.add_(8.0)  # every feature is positive
        layer.k_proj.bias.add_(8.0)
    assert max(errors()) < 0.02


def test_decoding_with_padding_equals_the_full_pass():
    layer = build(**FORMS["causal"])
    x, mask = randn(B, N, D), MASKS["holes"]
    want, got, state = layer(x, token_mask=mask), [], layer.init_state(B)
    for piece in (slice(0, 9), slice(9, 10), slice(10, N)):
        y, state = layer.prefill(x[:, piece], state, token_mask=mask[:, piece])
        got.append(y)
    assert_close(torch.cat(got, dim=1), want)
    assert state.num_tokens.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("options", [{}, {"causal": True, "max_tokens": 2048}])
def test_memory_is_linear(options):
    layer = CosformerAttention(D, H, **options)
    sizes = [largest_tensor(layer, num_tokens) for num_tokens in (1024, 2048)]
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 4 * 2048 * 2048 / 8


def test_errors():
    with pytest.raises(ValueError, match="max_tokens must be a positive integer, got 0"):
        CosformerAttention(D, H, max_tokens=0)
    layer = build(max_tokens=N - 1)
    with pytest.raises(ValueError, match="at most max_tokens=22 tokens, got 23"):
        layer(randn(B, N, D))
    with pytest.raises(ValueError, match="at most max_tokens=22 tokens, got 23"):
        layer(randn(B, 5, D), randn(B, N, D))
    assert "max_tokens=22" in repr(layer)


def test_a_causal_layer_has_a_longest_sequence_by_default():
    assert CosformerAttention(D, H, causal=True).max_tokens == 4096
    assert CosformerAttention(D, H).max_tokens is None


def test_decoding_stops_at_max_tokens():
    layer = build(causal=True, max_tokens=7)
    _, state = layer.prefill(randn(B, 7, D))
    with pytest.raises(ValueError, match="at most max_tokens=7 tokens, got 8"):
        layer.step(randn(B, D), state)
