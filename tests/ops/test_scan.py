from functools import partial

import pytest
import torch

from primal_attention.ops.scan import chunked, scan
from primal_attention.ops.scan import reference as scan_reference

from .formulas import (
    MAPS,
    MASKS,
    B,
    C,
    H,
    N,
    S,
    assert_close,
    assert_identical,
    assert_same,
    dense_scan,
    gradients,
    randn,
)

V = 11


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """23 tokens are four whole pieces and a ragged one."""
    monkeypatch.setattr(chunked, "_PIECE", 5)


def inputs(length=N, *, value_map=True, state=True):
    width = V if value_map else S
    return [
        2 * randn(B, length, H, C),
        2 * randn(B, length, H, C, seed=1),
        randn(B, length, H, S, seed=2),
        randn(S, V, seed=3) if value_map else None,
        randn(B, H, C, width, seed=4) if state else None,
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("value_map", [True, False])
def test_the_reference_is_the_recurrence(value_map, state, mask):
    options = {"token_mask": MASKS[mask], "map_q": "elu", "map_k": "cosine"}
    assert_same(
        partial(scan_reference.scan, **options),
        partial(dense_scan, **options),
        inputs(value_map=value_map, state=state),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("value_map", [True, False])
@pytest.mark.parametrize("feature_map", MAPS)
def test_in_pieces_it_equals_the_reference(feature_map, value_map, state, mask):
    options = {"token_mask": MASKS[mask], "map_q": feature_map, "map_k": feature_map}
    assert_same(
        partial(scan, **options),
        partial(scan_reference.scan, **options),
        inputs(value_map=value_map, state=state),
    )


@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 37])
@pytest.mark.parametrize("piece", [1, 5, 64])
def test_any_number_of_tokens_in_any_pieces(length, piece, monkeypatch):
    monkeypatch.setattr(chunked, "_PIECE", piece)
    assert_same(scan, scan_reference.scan, inputs(length))


@pytest.mark.parametrize("only", [0, 1])
def test_gradients_of_one_output_alone(only):
    assert_same(
        lambda *x: scan(*x)[only : only + 1], lambda *x: dense_scan(*x)[only : only + 1], inputs()
    )


def test_the_state_carries_on_where_a_scan_stopped():
    q, k, values, value_map, state = inputs()
    whole = scan(q, k, values, value_map, state)
    first = scan(q[:, :9], k[:, :9], values[:, :9], value_map, state)
    second = scan(q[:, 9:], k[:, 9:], values[:, 9:], value_map, first.state)
    assert_close(torch.cat([first.out, second.out], dim=1), whole.out)
    assert_close(second.state, whole.state)


def test_the_given_state_is_not_written_to():
    arguments = inputs()
    before = arguments[-1].clone()
    scan(*arguments)
    assert torch.equal(arguments[-1], before)


def test_inputs_may_be_slices_of_one_projection():
    packed, rest = randn(B, N, H, 2 * C + S), inputs()[3:]

    def through(op):
        return lambda packed, *rest: op(*packed.split([C, C, S], dim=-1), *rest)

    assert_same(through(scan), through(dense_scan), [packed, *rest])


def test_the_state_may_be_a_transposed_or_expanded_view():
    *rest, state = inputs()
    assert_same(lambda *x: scan(*x[:4], x[4].mT.contiguous().mT), dense_scan, [*rest, state])
    assert_same(
        lambda *x: scan(*x[:4], x[4].expand(B, -1, -1, -1)),
        lambda *x: dense_scan(*x[:4], x[4].expand(B, -1, -1, -1)),
        [*rest, state[:1]],
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feature_map", MAPS)
def test_what_features_stand_at_masked_tokens_reaches_nothing(feature_map, bad):
    mask = MASKS["empty"]
    q, k, *rest = inputs()
    poisoned = [torch.where(mask[..., None, None], z, bad) for z in (q, k)]
    run = partial(scan, token_mask=mask, map_q=feature_map, map_k=feature_map)
    assert_identical(gradients(run, [*poisoned, *rest]), gradients(run, [q, k, *rest]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_values_stand_at_masked_tokens_reaches_nothing(bad):
    mask = MASKS["empty"]
    q, k, values, *rest = inputs()
    poisoned = torch.where(mask[..., None, None], values, bad)
    run = partial(scan, token_mask=mask)
    got, want = (gradients(run, [q, k, v, *rest]) for v in (poisoned, values))
    assert_identical(got, want)


def test_a_later_token_changes_no_earlier_output():
    q, k, values, *rest = inputs()
    want = scan(q, k, values, *rest).out[:, :11]
    for tensor in (q, k, values):
        tensor[:, 11:] = 1e3
    assert torch.equal(scan(q, k, values, *rest).out[:, :11], want)
