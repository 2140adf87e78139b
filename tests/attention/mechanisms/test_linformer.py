"""Linformer against the paper's formula, and against the package linformer."""

import warnings

import pytest
import torch

from primal_attention.attention.baselines.linformer import LinformerAttention
from primal_attention.testing import Status, check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import LargestTensor, by_sequence, largest_tensor

M = 11


def build(**options):
    torch.manual_seed(0)
    options = {"max_tokens": 31, "num_projected": M} | options
    return LinformerAttention(D, H, **options).double().eval()


def published(layer):
    """One head, eq. (7): the first columns of E and F belong to the tokens there are."""
    e_proj, f_proj = layer.e_proj.T, (layer.e_proj if layer.f_proj is None else layer.f_proj).T

    def one_head(q, k, v, head):
        k_projected, v_projected = e_proj[:, : len(k)] @ k, f_proj[:, : len(v)] @ v
        return (q @ k_projected.T / C**0.5).softmax(-1) @ v_projected

    return one_head


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("share_kv", [False, True])
def test_against_the_paper(share_kv, mask):
    layer = build(share_kv=share_kv)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(layer, published(layer), x, MASKS[mask])
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("context_mask", ["none", "holes", "empty"])
def test_cross_attention_against_the_paper(context_mask):
    layer = build()
    x, context = randn(B, 47, D).requires_grad_(), randn(B, N, D, seed=1).requires_grad_()
    got = layer(x, context, context_mask=MASKS[context_mask])
    want = by_sequence(layer, published(layer), x, None, context, MASKS[context_mask])
    assert_same_with_gradients(layer, got, want, [x, context])


@pytest.mark.parametrize("length", [N, 31])
@pytest.mark.parametrize("with_context", [False, True])
def test_against_the_package_linformer(length, with_context):
    """It has no mask and no biases before the attention; the rest is the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from linformer import LinformerSelfAttention
    layer = build(bias=False)
    peer = LinformerSelfAttention(D, 31, k=M, heads=H).double().eval()
    names = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "out_proj": "to_out"}
    with torch.no_grad():
        for ours, theirs in names.items():
            getattr(peer, theirs).weight.copy_(getattr(layer, ours).weight)
        peer.to_out.bias.zero_()
        peer.proj_k.copy_(layer.e_proj)
        peer.proj_v.copy_(layer.f_proj)
    x = randn(B, length, D)
    context = randn(B, 29, D, seed=1) if with_context else None
    assert_close(layer(x, context), peer(x, context), 1e-12)


def test_the_start_has_the_variance_of_the_paper():
    torch.manual_seed(0)
    layer = LinformerAttention(D, H)
    assert layer.e_proj.shape == layer.f_proj.shape == (512, 256)
    for weight in (layer.e_proj, layer.f_proj):
        assert weight.var().item() == pytest.approx(1 / 256, rel=0.02)
    before = layer.e_proj.clone()
    layer.reset_parameters()
    assert not layer.e_proj.equal(before)


def test_number_of_projected_tokens():
    assert LinformerAttention(D, H, max_tokens=100).num_projected == 100
    assert "num_projected=256, share_kv=False" in repr(LinformerAttention(D, H))


@pytest.mark.parametrize("share_kv", [False, True])
def test_contract(share_kv):
    report = check_attention(
        lambda: LinformerAttention(D, H, max_tokens=140, num_projected=7, share_kv=share_kv)
    )
    skipped = {r.name for r in report.results if r.status is not Status.PASSED}
    assert skipped == {"causality", "decoding"}


def test_shared_projections_are_saved_once():
    assert "f_proj" in build().state_dict()
    assert "f_proj" not in build(share_kv=True).state_dict()


def test_memory_is_linear():
    layer = LinformerAttention(D, H, max_tokens=2048, num_projected=16)
    sizes = [largest_tensor(layer, num_tokens) for num_tokens in (1024, 2048)]
    assert sizes[1] <= 2 * sizes[0]
    assert sizes[1] < 4 * 2048 * 2048 / 8


def test_the_weights_of_a_sequence_are_never_written_out():
    """SDPA takes projected keys and values as they lie and writes out no weights."""
    layer = LinformerAttention(64, 2, max_tokens=512, num_projected=256)
    x = torch.randn(3, 512, 64, requires_grad=True)
    with LargestTensor() as largest:
        layer(x).sum().backward()
    assert largest.elements < 4 * 3 * 2 * 512 * 256


def test_errors():
    with pytest.raises(ValueError, match="LinformerAttention has no causal form"):
        LinformerAttention(D, H, causal=True)
    with pytest.raises(ValueError, match="num_projected must be at most max_tokens=8, got 9"):
        LinformerAttention(D, H, max_tokens=8, num_projected=9)
    with pytest.raises(ValueError, match="max_tokens must be a positive integer, got 0"):
        LinformerAttention(D, H, max_tokens=0)
    layer = build()
    with pytest.raises(ValueError, match="at most max_tokens=31 keys, got 32"):
        layer(randn(B, 32, D))
    with pytest.raises(ValueError, match="at most max_tokens=31 keys, got 32"):
        layer(randn(B, N, D), randn(B, 32, D))
