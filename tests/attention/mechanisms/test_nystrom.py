"""Nystrom attention against the paper's formula, against nystrom-attention and transformers."""

import types
import warnings

import pytest
import torch

from primal_attention.attention.baselines.nystrom import NystromAttention, pseudo_inverse
from primal_attention.attention.baselines.softmax import SoftmaxAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor


def build(**options):
    torch.manual_seed(0)
    options = {"num_landmarks": 5} | options
    return NystromAttention(D, H, **options).double().eval()


def published(layer):
    """One head: eq. (13) with segment means, and the pseudo-inverse of eq. (11)."""
    M = layer.num_landmarks

    def landmarks(z):
        segments = [[] for _ in range(M)]
        for i, token in enumerate(z):
            segments[i * M // len(z)].append(token)
        return torch.stack([sum(segment) / len(segment) for segment in segments])

    def inverse(a):
        z = a.T / (a.sum(0).max() * a.sum(1).max())
        eye = torch.eye(M).to(a)
        for _ in range(layer.num_iterations):
            z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
        return z

    def through_landmarks(q, k, v):
        if len(q) <= M:
            return (q @ k.T / C**0.5).softmax(-1) @ v
        q_means, k_means = landmarks(q), landmarks(k)
        left, middle, right = (
            (a @ b.T / C**0.5).softmax(-1)
            for a, b in ((q, k_means), (q_means, k_means), (q_means, k))
        )
        return left @ inverse(middle) @ right @ v

    def one_head(q, k, v, head):
        out = through_landmarks(q, k, v)
        if layer.conv is not None:
            taps = layer.conv.weight[head, 0, :, 0]
            half = len(taps) // 2
            padded = torch.cat([v.new_zeros(half, C), v, v.new_zeros(half, C)])
            out = out + sum(tap * padded[t : t + len(v)] for t, tap in enumerate(taps))
        return out

    return one_head


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_landmarks", [1, 5, 13, N])
@pytest.mark.parametrize("conv_kernel_size", [None, 3])
def test_against_the_paper(num_landmarks, conv_kernel_size, mask):
    """With 13 landmarks and holes some sequences have more real tokens than that, some fewer."""
    layer = build(num_landmarks=num_landmarks, conv_kernel_size=conv_kernel_size)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x], 1e-9)


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_few_iterations(num_iterations):
    layer = build(num_iterations=num_iterations)
    x = randn(B, N, D).requires_grad_()
    want = by_sequence(layer, published(layer), x)
    assert_same_with_gradients(layer, layer(x), want, [x], 1e-9)


def test_a_convolution_of_several_blocks():
    layer = build(conv_kernel_size=35)
    x = randn(B, 131, D).requires_grad_()
    mask = randn(B, 131, seed=1) < 0.8
    want = by_sequence(layer, published(layer), x, mask)
    assert_same_with_gradients(layer, layer(x, token_mask=mask), want, [x], 1e-9)


def test_the_masks_make_both_cases():
    num_real = MASKS["holes"].sum(1)
    assert num_real.min() <= 13 < num_real.max()


def test_few_tokens_get_softmax_attention():
    layer, softmax = build(num_landmarks=N), SoftmaxAttention(D, H).double()
    softmax.load_state_dict(layer.state_dict())
    x = randn(B, N, D)
    assert_close(layer(x), softmax(x), 1e-14)


def copy_projections(layer, query, key, value):
    with torch.no_grad():
        pairs = ((layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value))
        for ours, theirs in pairs:
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)


def without_output_projection(layer):
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(D))
        layer.out_proj.bias.zero_()
    return layer


@pytest.mark.parametrize("conv_kernel_size", [None, 3])
@pytest.mark.parametrize("num_landmarks", [5, 20])
def test_against_transformers(num_landmarks, conv_kernel_size):
    """Lengths that the landmarks divide, no mask: it pools padding into the landmarks.

    By default it starts the iteration from the largest norm of the whole batch, so that a sequence
    depends on its neighbours; its other start, which its own option cannot reach (it indexes the
    configuration like a dict), is ours.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.nystromformer.modeling_nystromformer import (
            NystromformerSelfAttention,
        )
    config = types.SimpleNamespace(
        hidden_size=D,
        num_attention_heads=H,
        num_landmarks=num_landmarks,
        segment_means_seq_len=20,
        conv_kernel_size=conv_kernel_size,
        inv_coeff_init_option=False,
        attention_probs_dropout_prob=0.0,
    )
    peer = NystromformerSelfAttention(config).double().eval()
    peer.init_option = "exact"
    layer = build(num_landmarks=num_landmarks, conv_kernel_size=conv_kernel_size)
    without_output_projection(layer)
    copy_projections(layer, peer.query, peer.key, peer.value)
    if conv_kernel_size is not None:
        peer.conv.load_state_dict(layer.conv.state_dict())
    x = randn(B, 20, D)
    want = peer(x)[0]
    assert_close(layer(x), want, 1e-10)

    peer.init_option = "original"
    in_a_batch, alone = peer(x)[0][:1], peer(x[:1])[0]
    assert in_a_batch.allclose(alone, rtol=0, atol=1e-7) == (num_landmarks == 20)


@pytest.mark.parametrize("conv_kernel_size", [None, 3])
def test_against_nystrom_attention(conv_kernel_size):
    """One sequence and one head, since it also starts from the largest norm of the batch.

    Its padding to a multiple of the landmarks counts as tokens, so 20 tokens and no mask.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nystrom_attention import NystromAttention as Peer
    torch.manual_seed(0)
    layer = NystromAttention(
        D, 1, num_landmarks=5, conv_kernel_size=conv_kernel_size, bias=False
    ).double()
    peer = Peer(
        D,
        dim_head=D,
        heads=1,
        num_landmarks=5,
        residual=conv_kernel_size is not None,
        residual_conv_kernel=3,
    ).double()
    with torch.no_grad():
        projections = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
        peer.to_qkv.weight.copy_(torch.cat(projections))
        peer.to_out[0].weight.copy_(layer.out_proj.weight)
        peer.to_out[0].bias.zero_()
        if conv_kernel_size is not None:
            peer.res_conv.load_state_dict(layer.conv.state_dict())
    x = randn(1, 20, D)
    assert_close(layer(x), peer(x), 1e-10)
    ones = torch.ones(1, 20, dtype=torch.bool)
    assert_close(layer(x, token_mask=ones), peer(x, mask=ones), 1e-10)


def test_the_iteration_converges_to_the_inverse():
    a = (3 * randn(2, 3, 8, 8)).softmax(-1)
    want = torch.linalg.inv(a)
    errors = [(pseudo_inverse(a, n) - want).norm() / want.norm() for n in (2, 6, 20)]
    assert errors[2] < 1e-9 < errors[1] < errors[0]


def test_equal_tokens_give_their_value():
    """The landmarks' attention is singular there; its pseudo-inverse is not."""
    layer = build().float()
    x = randn(1, 1, D, dtype=torch.float32).expand(2, N, D)
    want = layer.out_proj(layer.v_proj(x))
    assert_close(layer(x), want, 1e-4)


def test_contract_with_fewer_landmarks_than_tokens():
    report = check_attention(lambda: NystromAttention(D, H, num_landmarks=5, conv_kernel_size=3))
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == {"causality", "decoding", "cross-attention"}


def test_memory_is_linear():
    layer = NystromAttention(D, H, num_landmarks=16, conv_kernel_size=33)
    sizes = [largest_tensor(layer, num_tokens) for num_tokens in (1024, 2048)]
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 4 * 2048 * 2048 / 8


def test_errors():
    with pytest.raises(ValueError, match="NystromAttention has no causal form"):
        NystromAttention(D, H, causal=True)
    with pytest.raises(ValueError, match="conv_kernel_size must be odd, got 4"):
        NystromAttention(D, H, conv_kernel_size=4)
    with pytest.raises(ValueError, match="num_landmarks must be a positive integer, got 0"):
        NystromAttention(D, H, num_landmarks=0)
    with pytest.raises(ValueError, match="NystromAttention has no cross-attention"):
        build()(randn(B, N, D), randn(B, N, D))
    assert "num_landmarks=5" in repr(build())
