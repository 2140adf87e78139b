from functools import partial

import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.primal import (
    gram,
    primal_attention,
)
from primal_attention.ops.primal import reference as primal_reference

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
    dense_primal,
    gradients,
    randn,
    token_masks,
)

SHARED, BATCHED = "shared", "batched"


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 16 tokens, the least there is: 23 tokens are one and a ragged one."""
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})


def inputs(kind=BATCHED, *, length=N, scores="both", bias=True, width=C):
    lead = (B, H) if kind == BATCHED else (H,)
    return [
        2 * randn(B, length, H, C),
        2 * randn(B, length, H, C, seed=1),
        randn(*lead, C, S, seed=2),
        randn(*lead, C, S, seed=3),
        randn(S, width, seed=4) if scores in ("both", "e") else None,
        randn(S, width, seed=5) if scores in ("both", "r") else None,
        randn(width, seed=6) if bias else None,
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", [SHARED, BATCHED])
def test_the_reference_is_the_formula(kind, mask):
    options = {"token_mask": MASKS[mask], "map_q": "cosine", "map_k": "elu"}
    assert_same(
        partial(primal_reference.primal_attention, **options),
        partial(dense_primal, **options),
        inputs(kind),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", [SHARED, BATCHED])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.usefixtures("small_pieces")
def test_in_pieces_it_equals_the_reference(feature_map, kind, mask):
    options = {"token_mask": MASKS[mask], "map_q": feature_map, "map_k": feature_map}
    assert_same(
        partial(primal_attention, **options),
        partial(primal_reference.primal_attention, **options),
        inputs(kind),
    )


@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [SHARED, BATCHED])
@pytest.mark.usefixtures("small_pieces")
def test_one_side_of_the_scores_and_no_bias(scores, bias, kind):
    options = {"token_mask": MASKS["holes"], "map_q": "cosine", "map_k": "elu"}
    assert_same(
        partial(primal_attention, **options),
        partial(dense_primal, **options),
        inputs(kind, scores=scores, bias=bias),
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 37])
@pytest.mark.usefixtures("small_pieces")
def test_any_number_of_tokens(length):
    for mask in token_masks(B, length).values() if length > 4 else [None]:
        assert_same(
            partial(primal_attention, token_mask=mask),
            partial(primal_reference.primal_attention, token_mask=mask),
            inputs(length=length),
        )


def test_in_one_piece_it_equals_the_reference():
    assert_same(primal_attention, primal_reference.primal_attention, inputs())


def test_outputs_wider_than_the_head(small_pieces):
    assert_same(primal_attention, dense_primal, inputs(width=11))


def test_a_batch_without_sequences():
    arguments = [None if x is None else x[:0] for x in inputs()[:4]] + inputs()[4:]
    outputs, grads = gradients(primal_attention, arguments)
    assert [tuple(output.shape) for output in outputs] == [(0, N, H, C), *[(0, H, C, C)] * 2]
    for grad in grads[4:]:
        assert not grad.any()


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gram_matrices_that_are_not_wanted_are_empty(wanted):
    options = dict(zip(("gram_q", "gram_k"), wanted, strict=True))
    result = primal_attention(*inputs(), **options)
    full = primal_attention(*inputs())
    assert_close(result.out, full.out)
    for got, want, asked in zip(result[1:], full[1:], wanted, strict=True):
        if asked:
            assert_close(got, want)
        else:
            assert got.numel() == 0


@pytest.mark.parametrize("only", [0, 1, 2])
@pytest.mark.usefixtures("small_pieces")
def test_gradients_of_one_output_alone(only):
    """The other two outputs then have no gradient at all, not one of zeros."""
    options = {"token_mask": MASKS["holes"]}
    assert_same(
        lambda *x: primal_attention(*x, **options)[only : only + 1],
        lambda *x: dense_primal(*x, **options)[only : only + 1],
        inputs(SHARED),
    )


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.usefixtures("small_pieces")
def test_gram_of_one_side(feature_map, mask):
    options = {"token_mask": MASKS[mask], "feature_map": feature_map}

    def dense(z):
        phi = MAPS[feature_map](z)
        if MASKS[mask] is not None:
            phi = phi * MASKS[mask][:, :, None, None]
        return (torch.einsum("bnhp,bnho->bhpo", phi, phi),)

    assert_same(lambda z: (gram(z, **options),), dense, inputs()[:1])


def test_queries_and_keys_may_be_slices_of_one_projection(small_pieces):
    packed = randn(B, N, 2, H, C, seed=7)
    rest = inputs()[2:]

    def through(op):
        def run(packed, *rest):
            q, k = packed.unbind(2)
            assert not q.is_contiguous()
            return op(q, k, *rest, token_mask=MASKS["holes"])

        return run

    assert_same(through(primal_attention), through(dense_primal), [packed, *rest])


def test_weights_and_maps_may_be_transposed_views(small_pieces):
    q, k, w_e, w_r, c_e, c_r, bias = inputs()
    views = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k.transpose(1, 3).contiguous().transpose(1, 3),
        *(w.mT.contiguous().mT for w in (w_e, w_r, c_e, c_r)),
        bias.expand(2, C)[1],
    ]
    assert not any(view.is_contiguous() for view in views[:6])
    got, want = gradients(primal_attention, views), gradients(dense_primal, inputs())
    for one, other in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.usefixtures("small_pieces")
def test_what_stands_at_masked_tokens_reaches_nothing(feature_map, bad):
    mask = MASKS["empty"]
    options = {"token_mask": mask, "map_q": feature_map, "map_k": feature_map}
    clean = inputs()
    q, k = (torch.where(mask[..., None, None], z, bad) for z in clean[:2])
    run = partial(primal_attention, **options)
    assert_identical(gradients(run, [q, k, *clean[2:]]), gradients(run, clean))


@pytest.mark.usefixtures("small_pieces")
def test_outputs_and_gradients_at_masked_tokens_are_zero():
    mask = MASKS["empty"]
    (out, *_), (dq, dk, *_) = gradients(partial(primal_attention, token_mask=mask), inputs())
    for tensor in (out, dq, dk):
        assert not tensor[~mask].any()
        assert tensor[mask].any()


def test_the_gradient_of_a_zero_query_is_zero():
    q, *rest = inputs()
    q[0, 3] = 0
    (out, *_), (dq, *_) = gradients(primal_attention, [q, *rest])
    assert not dq[0, 3].any()
    assert out.isfinite().all()
    assert dq.isfinite().all()
