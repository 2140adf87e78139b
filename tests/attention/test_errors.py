"""Wrong arguments: the message names the argument and what was received."""

import math

import pytest
import torch

from primal_attention import PrimalAttention, build_attention
from primal_attention.feature_maps import ExponentialFeatureMap

from .dense import B, C, D, H, N, S, build, randn

CONSTRUCTOR = [
    ({"dim": 16, "num_heads": 3}, r"dim .*num_heads.*dim=16.*num_heads=3"),
    ({"dim": 0}, r"dim .*got 0"),
    ({"dim": -15}, r"dim .*got -15"),
    ({"dim": 15.0}, r"dim .*got 15\.0"),
    ({"num_heads": 0}, r"num_heads .*got 0"),
    ({"num_directions": 0}, r"num_directions .*got 0"),
    ({"num_directions": 2.5}, r"num_directions .*got 2\.5"),
    ({"samples_per_direction": 0}, r"samples_per_direction .*got 0"),
    ({"max_tokens": 0}, r"max_tokens .*got 0"),
    ({"max_tokens": -1}, r"max_tokens .*got -1"),
    ({"weights": "kernel"}, r"weights .*static.*sampled.*dual.*got 'kernel'"),
    ({"scores": "q"}, r"scores .*both.*got 'q'"),
    ({"feature_map": "softmax"}, r"feature_map .*cosine.*exponential.*got 'softmax'"),
    ({"feature_map": ExponentialFeatureMap(7)}, r"feature_map .*7.*5"),
    ({"feature_map": ExponentialFeatureMap(5, 11)}, r"weights='sampled'.*feature_map.*11.*5"),
    ({"landmark_jitter": -0.1}, r"landmark_jitter .*got -0\.1"),
    ({"landmark_jitter": math.nan}, r"landmark_jitter .*got nan"),
    ({"gain": 0.0}, r"gain .*got 0\.0"),
    ({"gain": math.inf}, r"gain .*got inf"),
    ({"gain": 2.0, "weights": "dual"}, r"gain .*'dual'.*got 2\.0"),
    ({"landmark_dropout": 1.0}, r"landmark_dropout .*got 1\.0"),
    ({"landmark_dropout": -0.1}, r"landmark_dropout .*got -0\.1"),
    ({"dropout": 1.0}, r"dropout .*got 1\.0"),
    ({"dropout": -0.5}, r"dropout .*got -0\.5"),
    ({"dropout": math.nan}, r"dropout .*got nan"),
    ({"causal": True}, r"causal=True .*weights='sampled'"),
    ({"causal": True, "weights": "sampled"}, r"causal=True .*weights='sampled'"),
]


@pytest.mark.parametrize(("options", "message"), CONSTRUCTOR, ids=lambda value: str(value)[:40])
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PrimalAttention(**({"dim": D, "num_heads": H} | options))
    with pytest.raises(ValueError, match=message):
        build_attention("primal", **({"dim": D, "num_heads": H} | options))


def test_good_options_at_the_edge_are_accepted():
    PrimalAttention(1, 1, 1, samples_per_direction=1, max_tokens=1)
    PrimalAttention(D, H, landmark_jitter=0, landmark_dropout=0, dropout=0)
    PrimalAttention(D, H, landmark_jitter=1.7, landmark_dropout=0.99, dropout=0.99)


def test_options_after_the_third_are_by_name_only():
    with pytest.raises(TypeError):
        PrimalAttention(D, H, S, "static")


def test_the_registry_knows_its_names_and_options():
    with pytest.raises(ValueError, match=r"name .*'primal'.*got 'flash'"):
        build_attention("flash", D, H)
    with pytest.raises(TypeError, match="num_direction"):
        build_attention("primal", D, H, num_direction=S)
    with pytest.raises(TypeError):
        build_attention("primal", D)


@pytest.fixture(params=["sampled", "static", "dual"])
def layer(request):
    return build(weights=request.param)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((B, N, D + 1), r"x .*15.*got \[2, 23, 16\]"),
        ((N, D), r"x .*got \[23, 15\]"),
        ((B, 1, N, D), r"x .*got \[2, 1, 23, 15\]"),
        ((B, 0, D), r"x .*at least one token.*got .*\[2, 0, 15\]"),
    ],
)
def test_tokens_of_the_wrong_shape(layer, shape, message):
    with pytest.raises(ValueError, match=message):
        layer(randn(*shape))


def test_tokens_of_the_wrong_dtype(layer):
    with pytest.raises(ValueError, match=r"x .*floating.*torch.int64"):
        layer(torch.ones(B, N, D, dtype=torch.int64))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(B, N), r"token_mask .*bool.*torch.float32"),
        (torch.ones(B, N, dtype=torch.int64), r"token_mask .*bool.*torch.int64"),
        (torch.ones(B, N + 1).bool(), r"token_mask .*\[2, 23\].*got \[2, 24\]"),
        (torch.ones(N).bool(), r"token_mask .*\[2, 23\].*got \[23\]"),
        (torch.ones(1, N).bool(), r"token_mask .*\[2, 23\].*got \[1, 23\]"),
        (torch.ones(B, 1, 1, N).bool(), r"token_mask .*\[2, 23\].*got \[2, 1, 1, 23\]"),
    ],
)
def test_masks_of_the_wrong_shape_or_dtype(layer, mask, message):
    with pytest.raises(ValueError, match=message):
        layer(randn(B, N, D), token_mask=mask)


@pytest.mark.parametrize("weights", ["sampled", "dual"])
def test_contexts_that_do_not_fit(weights):
    layer, x = build(weights=weights), randn(B, N, D)
    with pytest.raises(ValueError, match=r"context .*15.*got \[2, 13, 16\]"):
        layer(x, randn(B, 13, D + 1))
    with pytest.raises(ValueError, match=r"context .*batch size 2.*got 3"):
        layer(x, randn(B + 1, 13, D))
    with pytest.raises(ValueError, match=r"context .*at least one token.*\[2, 0, 15\]"):
        layer(x, randn(B, 0, D))
    with pytest.raises(ValueError, match=r"context_mask .*bool.*torch.float32"):
        layer(x, randn(B, 13, D), context_mask=torch.ones(B, 13))
    with pytest.raises(ValueError, match=r"context_mask .*\[2, 13\].*got \[2, 23\]"):
        layer(x, randn(B, 13, D), context_mask=torch.ones(B, N).bool())


def test_a_context_mask_without_a_context(layer):
    with pytest.raises(ValueError, match=r"context_mask \[2, 23\] .*without a context"):
        layer(randn(B, N, D), context_mask=torch.ones(B, N).bool())


def test_masks_are_by_name_only(layer):
    with pytest.raises(TypeError):
        layer(randn(B, N, D), None, torch.ones(B, N).bool())


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_prefill_checks_its_inputs(weights):
    layer = build(weights=weights, causal=True)
    with pytest.raises(ValueError, match=r"x .*15.*got \[2, 23, 16\]"):
        layer.prefill(randn(B, N, D + 1))
    with pytest.raises(ValueError, match=r"token_mask .*\[2, 23\].*got \[2, 22\]"):
        layer.prefill(randn(B, N, D), token_mask=torch.ones(B, N - 1).bool())


def test_a_feature_map_of_another_size_is_named_before_anything_is_built():
    with pytest.raises(ValueError, match=r"feature_map.*normalised.*exponential.*cosine"):
        build(feature_map=("exponential", "cosine"))
    with pytest.raises(ValueError, match=r"feature_map.*one size.*11 and 5"):
        build(weights="static", feature_map=(ExponentialFeatureMap(C, 11), "exponential"))
