from functools import partial

import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.moment import moment
from primal_attention.ops.moment import reference as moment_reference

from .formulas import (
    MAPS,
    MASKS,
    B,
    C,
    H,
    N,
    S,
    assert_identical,
    assert_same,
    dense_moment,
    gradients,
    randn,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})


def inputs(length=N):
    return [2 * randn(B, length, H, C), randn(B, length, H, S, seed=1)]


def one(op, **options):
    return lambda *x: (op(*x, **options),)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature_map", MAPS)
def test_the_reference_is_the_formula(feature_map, mask):
    options = {"token_mask": MASKS[mask], "feature_map": feature_map}
    assert_same(one(moment_reference.moment, **options), partial(dense_moment, **options), inputs())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature_map", MAPS)
def test_in_pieces_it_equals_the_reference(feature_map, mask):
    options = {"token_mask": MASKS[mask], "feature_map": feature_map}
    assert_same(one(moment, **options), one(moment_reference.moment, **options), inputs())


@pytest.mark.parametrize("length", [1, 16, 17, 37])
def test_any_number_of_tokens(length):
    assert_same(one(moment), dense_moment, inputs(length))


def test_in_one_piece(monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1 << 18, "cuda": 1})
    assert_same(one(moment), dense_moment, inputs())


def test_both_may_be_slices_of_one_projection():
    packed = randn(B, N, H, C + S)

    def through(op):
        return lambda packed: op(packed[..., :C], packed[..., C:])

    assert_same(through(one(moment)), through(dense_moment), [packed])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feature_map", MAPS)
def test_what_features_stand_at_masked_tokens_reaches_nothing(feature_map, bad):
    mask = MASKS["empty"]
    z, values = inputs()
    poisoned = torch.where(mask[..., None, None], z, bad)
    run = one(moment, token_mask=mask, feature_map=feature_map)
    assert_identical(gradients(run, [poisoned, values]), gradients(run, [z, values]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_values_stand_at_masked_tokens_reaches_nothing(bad):
    mask = MASKS["empty"]
    z, values = inputs()
    poisoned = torch.where(mask[..., None, None], values, bad)
    run = one(moment, token_mask=mask)
    assert_identical(gradients(run, [z, poisoned]), gradients(run, [z, values]))


def test_gradients_at_masked_tokens_are_zero():
    mask = MASKS["empty"]
    _, grads = gradients(one(moment, token_mask=mask), inputs())
    for grad in grads:
        assert not grad[~mask].any()
        assert grad[mask].any()
