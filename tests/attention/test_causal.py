"""Causal layers: no token sees the future, and decoding gives what the full pass gives."""

from itertools import pairwise

import pytest
import torch

from primal_attention import PrimalAttention
from primal_attention.ops.op import chunk_elements

from .dense import (
    MASKS,
    B,
    C,
    D,
    H,
    N,
    S,
    assert_close,
    assert_same_with_gradients,
    build,
    dense,
    randn,
)

FORMS = [
    {"weights": weights, "feature_map": feature_map}
    for weights in ("static", "dual")
    for feature_map in ("cosine", "elu", "exponential", ("relu", "identity"))
]


@pytest.fixture(params=FORMS, ids=lambda form: f"{form['weights']} {form['feature_map']}")
def layer(request):
    return build(causal=True, **request.param).eval()


@pytest.fixture(autouse=True)
def short_chunks():
    """Scans cross several chunks; a prefill starts in the middle of one."""
    with chunk_elements(1):
        yield


@pytest.mark.parametrize("t", [1, 9, N - 1])
@pytest.mark.parametrize("mask", ["none", "holes"])
def test_the_future_changes_nothing(layer, t, mask):
    token_mask = MASKS[mask]
    x = randn(B, N, D)
    want = layer(x, token_mask=token_mask)[:, :t]
    other = torch.cat([x[:, :t], 100 * randn(B, N - t, D, seed=1)], dim=1)
    assert torch.equal(layer(other, token_mask=token_mask)[:, :t], want)
    short = None if token_mask is None else token_mask[:, :t]
    assert_close(layer(x[:, :t], token_mask=short), want)


def test_gradients_do_not_come_from_the_future(layer):
    x = randn(B, N, D).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x)[:, 8].square().sum(), x)
    assert not gradient[:, 9:].any()
    assert (gradient[:, :9].abs().amax((0, 2)) > 0).all(), "and they come from all of the past"


@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("weights", ["static", "dual"])
def test_steps_equal_the_full_pass(weights, scores):
    layer = build(weights=weights, causal=True, scores=scores).eval()
    assert_steps_equal(layer)


def test_steps_equal_the_full_pass_for_every_map(layer):
    assert_steps_equal(layer)


def assert_steps_equal(layer):
    x = randn(B, N, D)
    state, outputs = layer.init_state(B), []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        assert y_t.shape == (B, D)
        outputs.append(y_t)
    assert_close(torch.stack(outputs, dim=1), layer(x))
    assert_close(torch.stack(outputs, dim=1), dense(layer, x))


@pytest.mark.parametrize("bounds", [(0, N), (0, 1, N), (0, 11, 12, N), (0, 5, 10, 15, 20, N)])
@pytest.mark.parametrize("mask", MASKS)
def test_prefill_in_chunks_equals_the_full_pass(layer, bounds, mask):
    token_mask = MASKS[mask]
    x = randn(B, N, D)
    state, outputs = None, []
    for start, stop in pairwise(bounds):
        part = None if token_mask is None else token_mask[:, start:stop]
        y, state = layer.prefill(x[:, start:stop], state, token_mask=part)
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), dense(layer, x, token_mask))


@pytest.mark.parametrize("mask", ["none", "holes"])
def test_gradients_flow_through_the_state(layer, mask):
    token_mask = MASKS[mask]
    x = randn(B, N, D).requires_grad_()
    state, outputs = None, []
    for start, stop in pairwise((0, 1, 9, N)):
        part = None if token_mask is None else token_mask[:, start:stop]
        y, state = layer.prefill(x[:, start:stop], state, token_mask=part)
        outputs.append(y)
    got = torch.cat(outputs, dim=1)
    assert_same_with_gradients(layer, got, layer(x, token_mask=token_mask), [x])


@pytest.mark.parametrize("mask", MASKS)
def test_a_state_does_not_know_how_it_came_about(layer, mask):
    """After a masked prefill it is that of the real tokens alone, stepped through one by one."""
    token_mask = MASKS[mask]
    x = randn(B, N, D)
    _, state = layer.prefill(x, token_mask=token_mask)
    for b in range(B):
        real = x[b] if token_mask is None else x[b, token_mask[b]]
        alone = layer.init_state(1)
        for x_t in real:
            _, alone = layer.step(x_t[None], alone)
        for name, value in alone._asdict().items():
            assert_close(getattr(state, name)[b : b + 1], value)
        assert state.num_tokens[b] == len(real)


@pytest.mark.parametrize("mask", ["padded", "holes"])
def test_steps_after_a_masked_prefill(layer, mask):
    token_mask = MASKS[mask]
    x, later = randn(B, N, D), randn(B, 4, D, seed=1)
    _, state = layer.prefill(x, token_mask=token_mask)
    outputs = []
    for x_t in later.unbind(1):
        y_t, state = layer.step(x_t, state)
        outputs.append(y_t)
    whole = torch.cat([token_mask, torch.ones(B, 4, dtype=torch.bool)], dim=1)
    want = layer(torch.cat([x, later], dim=1), token_mask=whole)[:, N:]
    assert_close(torch.stack(outputs, dim=1), want)


def test_the_state_is_batch_first_and_can_be_split_and_joined(layer):
    x = randn(B, N, D)
    want = layer(x)
    _, state = layer.prefill(x[:, :11])
    rows = [type(state)(*(value[b : b + 1] for value in state)) for b in (1, 0)]
    joined = type(state)(*(torch.cat(values) for values in zip(*rows, strict=True)))
    y, _ = layer.step(x[[1, 0], 11], joined)
    assert_close(y, want[[1, 0], 11])


def test_the_state_has_a_constant_size(layer):
    state = layer.init_state(B)
    P = layer.features.feature_dim
    side = (B, H, C) if layer.weights == "static" else (B, H, P, S)
    key_sum = (B, H, P if layer.features.normalised else 0)
    expected = [side, side, (B,), key_sum]
    assert isinstance(state, tuple)
    assert state._fields == ("q_side", "k_side", "num_tokens", "key_sum")
    assert [tuple(value.shape) for value in state] == expected
    assert not any(value.any() for value in state)
    for length in (1, N, 97):
        _, after = layer.prefill(randn(B, length, D))
        assert [tuple(value.shape) for value in after] == expected
        assert after.num_tokens.tolist() == [length] * B


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_state_is_in_at_least_float32(layer, dtype):
    layer = layer.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    x = randn(B, N, D, dtype=dtype)
    state = layer.init_state(B)
    assert {value.dtype for value in state} == {wide}
    y, state = layer.prefill(x)
    assert y.dtype == dtype
    assert {value.dtype for value in state} == {wide}
    y, state = layer.step(x[:, 0], state)
    assert y.dtype == dtype
    assert {value.dtype for value in state} == {wide}


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_a_step_does_not_write_to_the_state_it_was_given(weights):
    layer = build(weights=weights, causal=True).eval()
    _, state = layer.prefill(randn(B, N, D))
    before = [value.clone() for value in state]
    layer.step(randn(B, D), state)
    for value, kept in zip(state, before, strict=True):
        assert torch.equal(value, kept)


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_long_half_precision_decoding_keeps_counting(weights):
    """In bfloat16 a count or a sum of ones would stop at 256."""
    layer = build(weights=weights, causal=True, dtype=torch.bfloat16, feature_map="elu").eval()
    x = randn(1, 1, D, dtype=torch.bfloat16).expand(1, 600, D)
    y, state = layer.prefill(x)
    assert state.num_tokens.item() == 600
    assert_close(y[:, 599], y[:, 0], 0.05)
    y_t, state = layer.step(x[:, 0], state)
    assert state.num_tokens.item() == 601
    assert_close(y_t, y[:, 0], 0.05)


def test_prefill_and_step_in_training_record_no_statistics():
    layer = build(weights="static", causal=True).train()
    _, state = layer.prefill(randn(B, N, D))
    layer.step(randn(B, D), state)
    assert layer.passes.runs == []


@pytest.mark.parametrize("method", ["init_state", "prefill", "step"])
@pytest.mark.parametrize("weights", ["static", "sampled", "dual"])
def test_layers_that_are_not_causal_do_not_decode(weights, method):
    layer = build(weights=weights)
    arguments = {
        "init_state": (B,),
        "prefill": (randn(B, N, D),),
        "step": (randn(B, D), build(weights="static", causal=True).init_state(B)),
    }[method]
    with pytest.raises(ValueError, match=r"causal=True"):
        getattr(layer, method)(*arguments)


def test_a_step_of_the_wrong_shape_is_refused():
    layer = build(weights="static", causal=True)
    for x_t in (randn(B, 1, D), randn(B, D + 1), randn(D)):
        with pytest.raises((ValueError, IndexError)):
            layer.step(x_t, layer.init_state(B))


@pytest.mark.parametrize("weights", ["static", "dual"])
def test_the_first_state_is_of_plain_tensors(weights):
    class Sharded(torch.Tensor):
        """A kind of its own, as the parameters of sharded and of quantised layers are."""

    layer = PrimalAttention(12, 3, 2, weights=weights, causal=True)
    layer.q_proj.weight = torch.nn.Parameter(layer.q_proj.weight.detach().as_subclass(Sharded))
    assert isinstance(layer.q_proj.weight, Sharded)
    assert all(type(each) is torch.Tensor for each in layer.init_state(2))
