"""A static layer folded into two matrices gives the same outputs."""

import copy
import pickle

import pytest
import torch

from primal_attention.feature_maps import ExponentialFeatureMap

from .dense import MASKS, B, C, D, H, N, build, randn

MAPS = ["cosine", "elu", "exponential", ("relu", "identity")]


@pytest.fixture(params=[False, True], ids=["not causal", "causal"])
def causal(request):
    return request.param


def pair(**options):
    """A static layer in float32, away from its start, and what it folds into."""
    layer = build(weights="static", dtype=torch.float32, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    layer.eval()
    return layer, layer.fold()


def assert_close(actual, expected, tolerance=1e-5):
    scale = max(expected.abs().max().item(), 1.0)
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=tolerance)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("feature_map", MAPS, ids=str)
def test_outputs_are_those_of_the_layer(causal, feature_map, scores, mask):
    layer, folded = pair(causal=causal, feature_map=feature_map, scores=scores)
    x = randn(B, N, D, dtype=torch.float32)
    with torch.no_grad():
        got = folded(x, token_mask=MASKS[mask])
        assert_close(got, layer(x, token_mask=MASKS[mask]))
    if MASKS[mask] is not None:
        assert not got[~MASKS[mask]].any()


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"dropout": 0.5}, {"scores": "e", "bias": False}]
)
def test_other_options(causal, options):
    layer, folded = pair(causal=causal, **options)
    x = randn(B, N, D, dtype=torch.float32)
    assert_close(folded(x), layer(x))


def test_more_features_than_dimensions(causal):
    torch.manual_seed(0)
    layer, folded = pair(causal=causal, feature_map=ExponentialFeatureMap(C, 11))
    x = randn(B, N, D, dtype=torch.float32)
    assert_close(folded(x), layer(x))


def test_in_double_precision_it_is_equal_to_1e_10(causal):
    layer = build(weights="static", causal=causal)
    x = randn(B, N, D)
    torch.testing.assert_close(layer.fold()(x), layer(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("feature_map", MAPS, ids=str)
def test_decoding(feature_map, scores):
    layer, folded = pair(causal=True, feature_map=feature_map, scores=scores)
    x, mask = randn(B, N, D, dtype=torch.float32), MASKS["holes"]
    with torch.no_grad():
        want, state = layer.prefill(x, token_mask=mask)
        got, folded_state = folded.prefill(x[:, :9], token_mask=mask[:, :9])
        rest, folded_state = folded.prefill(x[:, 9:], folded_state, token_mask=mask[:, 9:])
        assert_close(torch.cat([got, rest], dim=1), want)
        for t in range(4):
            y, state = layer.step(x[:, t], state)
            y_folded, folded_state = folded.step(x[:, t], folded_state)
            assert y_folded.shape == (B, D)
            assert_close(y_folded, y)
    assert torch.equal(folded_state.num_tokens, state.num_tokens)


def test_steps_from_the_start():
    layer, folded = pair(causal=True)
    x = randn(B, N, D, dtype=torch.float32)
    state, outputs = folded.init_state(B), []
    for x_t in x.unbind(1):
        y_t, state = folded.step(x_t, state)
        outputs.append(y_t)
    assert_close(torch.stack(outputs, dim=1), layer(x))
    assert [tuple(v.shape) for v in folded.init_state(B)] == [
        tuple(v.shape) for v in layer.init_state(B)
    ]


@pytest.mark.parametrize("scores", ["both", "e", "r"])
def test_one_matrix_follows_the_features(causal, scores):
    _, folded = pair(causal=causal, scores=scores)
    shapes = {name: tuple(each.shape) for name, each in folded.named_parameters() if each.ndim > 1}
    sides = 2 if scores == "both" else 1
    assert shapes.pop("out_proj.weight") == (D, sides * H * C)
    assert shapes == {"q_proj.weight": (D, D), "k_proj.weight": (D, D)}


def test_it_is_for_inference_and_shares_nothing():
    layer, folded = pair(causal=True, feature_map="exponential")
    assert not folded.training
    assert not any(p.requires_grad for p in folded.parameters())
    x = randn(B, N, D, dtype=torch.float32)
    want = folded(x)
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor.fill_(0.5)
    assert torch.equal(folded(x), want)


def test_it_can_be_copied_pickled_and_cast():
    layer, folded = pair(causal=True)
    x = randn(B, N, D, dtype=torch.float32)
    for twin in (copy.deepcopy(folded), pickle.loads(pickle.dumps(folded))):
        assert torch.equal(twin(x), folded(x))
    other = pair(causal=True)[1]
    other.load_state_dict(folded.state_dict())
    assert torch.equal(other(x), folded(x))
    wide = folded.double()
    assert_close(wide(x.double()).float(), layer(x))
    assert_close(wide.prefill(x.double())[0].float(), layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(causal, dtype):
    layer = build(weights="static", causal=causal, dtype=dtype).eval()
    folded = layer.fold()
    x = randn(B, N, D, dtype=dtype)
    got = folded(x)
    assert got.dtype == dtype
    want = layer.double()(x.double())
    assert (got.double() - want).norm() / want.norm() < 16 * torch.finfo(dtype).eps
    if causal:
        assert {value.dtype for value in folded.prefill(x)[1]} == {torch.float32}


@pytest.mark.parametrize("weights", ["sampled", "dual"])
def test_weights_that_depend_on_the_input_cannot_be_folded(weights):
    with pytest.raises(ValueError, match=f"fold .*weights='static'.*got '{weights}'"):
        build(weights=weights).fold()


def test_it_refuses_what_the_layer_refuses():
    _, folded = pair()
    x = randn(B, N, D, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"x must have shape .*15\], got \[2, 23, 16\]"):
        folded(randn(B, N, D + 1, dtype=torch.float32))
    with pytest.raises(ValueError, match=r"token_mask .*bool.*float32"):
        folded(x, token_mask=torch.ones(B, N))
    for call in (lambda: folded.init_state(B), lambda: folded.prefill(x)):
        with pytest.raises(ValueError, match="causal=True"):
            call()
