"""Whatever stands at masked positions, and however many of them there are, is never seen."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention import PrimalAttention, ksvd_loss

from .dense import MASKS, B, D, N, build, randn

POISONS = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]
FORMS = [("static", False), ("sampled", False), ("dual", False), ("static", True), ("dual", True)]
MAPS = ["cosine", "elu", "relu", "identity", "exponential"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
HEADS, DIM, DIRECTIONS = 2, 6, 3


@cache
def layer_of(form, feature_map, dtype):
    torch.manual_seed(0)
    weights, causal = form
    layer = PrimalAttention(
        DIM,
        HEADS,
        DIRECTIONS,
        weights=weights,
        causal=causal,
        feature_map=feature_map,
        samples_per_direction=2,
    )
    return layer.to(dtype).eval()


masks = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3
    )
)


@given(
    rows=masks,
    form=st.sampled_from(FORMS),
    feature_map=st.sampled_from(MAPS),
    dtype=st.sampled_from(DTYPES),
    poison=st.sampled_from(POISONS),
    extra=st.integers(0, 9),
    front=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_padding_is_never_seen(rows, form, feature_map, dtype, poison, extra, front):
    layer = layer_of(form, feature_map, dtype)
    mask = torch.tensor(rows)
    x = randn(*mask.shape, DIM, seed=mask.sum().item(), dtype=dtype)
    clean = torch.where(mask[..., None], x, 0.0)
    want = layer(clean, token_mask=mask)
    assert want.isfinite().all()

    poisoned = torch.where(mask[..., None], x, poison)
    got = layer(poisoned, token_mask=mask)
    assert torch.equal(got, want), "the same computation on other masked tokens"
    assert not got[~mask].any(), "outputs at padding are 0"

    if dtype is torch.bfloat16:
        return  # other lengths are other roundings
    junk = torch.full((len(mask), extra, DIM), poison, dtype=dtype)
    none = torch.zeros(len(mask), extra, dtype=torch.bool)
    order = (junk, poisoned) if front else (poisoned, junk)
    mask_order = (none, mask) if front else (mask, none)
    longer = layer(torch.cat(order, dim=1), token_mask=torch.cat(mask_order, dim=1))
    length = mask.shape[1]
    kept, added = (
        (longer[:, extra:], longer[:, :extra]) if front else longer.split([length, extra], 1)
    )
    scale = max(want.abs().max().item(), 1.0)
    assert (kept - want).abs().max() <= 1e-6 * scale
    assert not added.any()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("mask", ["padded", "holes", "empty"])
def test_gradients_and_objectives_do_not_see_it_either(form, mask, poison):
    weights, causal = form
    layer = build(weights=weights, causal=causal).train()
    token_mask = MASKS[mask]
    results = []
    for filling in (0.0, poison):
        x = torch.where(token_mask[..., None], randn(B, N, D), filling).requires_grad_()
        y = layer(x, token_mask=token_mask)
        total = y.square().sum() + ksvd_loss(layer) + ksvd_loss(layer, objective="explained_energy")
        inputs = [x, *layer.parameters()]
        results.append([total, *torch.autograd.grad(total, inputs)])
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)
    assert not results[1][1][~token_mask].any()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_mask_that_masks_nothing_is_no_mask(form):
    weights, causal = form
    layer = build(weights=weights, causal=causal)
    x = randn(B, N, D)
    torch.testing.assert_close(
        layer(x, token_mask=torch.ones(B, N, dtype=torch.bool)), layer(x), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_sequence_is_alone_with_itself(form):
    """Neighbours in the batch and their lengths change nothing."""
    weights, causal = form
    layer = build(weights=weights, causal=causal).eval()
    x, mask = randn(B, N, D), MASKS["holes"]
    together = layer(x, token_mask=mask)
    for b in range(B):
        alone = layer(x[b : b + 1, mask[b]])
        torch.testing.assert_close(together[b, mask[b]], alone[0], rtol=1e-10, atol=1e-10)


def test_dropout_does_not_write_to_padding():
    layer = build(dropout=0.5).train()
    mask = MASKS["padded"]
    y = layer(randn(B, N, D), token_mask=mask)
    assert not y[~mask].any()
    assert y[mask].any()
