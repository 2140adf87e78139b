from functools import partial

import pytest
import torch

from primal_attention.ops import chunks
from primal_attention.ops.causal_primal import causal_primal_attention, reference
from primal_attention.ops.running_mean import token_counts

from .formulas import MAPS, MASKS, B, C, H, N, S, assert_identical, assert_same, gradients, randn

BEFORE = torch.tensor([3.0, 0.0])


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})


def inputs():
    return [
        2 * randn(B, N, H, C),
        2 * randn(B, N, H, C, seed=1),
        randn(H, C, S, seed=2),
        randn(H, C, S, seed=3),
        randn(S, C, seed=4),
        randn(S, C, seed=5),
        randn(C, seed=6),
        randn(B, H, C, seed=7),
        randn(B, H, C, seed=8),
    ]


def options(mask, map_q="cosine", map_k="cosine"):
    counts = token_counts(torch.empty(B, N), mask, BEFORE)
    return {"counts": counts, "token_mask": mask, "map_q": map_q, "map_k": map_k}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature_map", MAPS)
def test_it_equals_the_reference(feature_map, mask):
    chosen = options(MASKS[mask], feature_map, "cosine")
    assert_same(
        partial(causal_primal_attention, **chosen),
        partial(reference.causal_primal_attention, **chosen),
        inputs(),
    )


@pytest.mark.parametrize("missing", [(4,), (5,), (6, 7, 8)], ids=["e", "r", "bias and sums"])
def test_without_some_input(missing):
    tensors = [None if i in missing else x for i, x in enumerate(inputs())]
    chosen = options(None)
    assert_same(
        partial(causal_primal_attention, **chosen),
        partial(reference.causal_primal_attention, **chosen),
        tensors,
    )


@pytest.mark.parametrize("only", range(5))
def test_gradients_of_one_output_alone(only):
    chosen = options(MASKS["holes"])
    assert_same(
        lambda *x: causal_primal_attention(*x, **chosen)[only : only + 1],
        lambda *x: reference.causal_primal_attention(*x, **chosen)[only : only + 1],
        inputs(),
    )


def test_grams_that_are_not_wanted_are_empty():
    result = causal_primal_attention(*inputs(), **options(None), grams=False)
    assert result.gram_q.numel() == result.gram_k.numel() == 0


def test_a_later_token_changes_no_earlier_output():
    q, k, *rest = inputs()
    want = causal_primal_attention(q, k, *rest, **options(None)).out[:, :11]
    q[:, 11:], k[:, 11:] = 1e3, -1e3
    assert torch.equal(causal_primal_attention(q, k, *rest, **options(None)).out[:, :11], want)


def test_what_stands_at_masked_tokens_reaches_nothing():
    mask = MASKS["empty"]
    q, k, *rest = inputs()
    bad = [torch.where(mask[..., None, None], z, float("nan")) for z in (q, k)]
    run = partial(causal_primal_attention, **options(mask))
    assert_identical(gradients(run, [*bad, *rest]), gradients(run, [q, k, *rest]))


def test_as_pytorch_sees_it():
    """Gradients of gradients, and the registration."""
    tensors = [x.requires_grad_() for x in inputs()]
    chosen = options(MASKS["empty"])
    run = partial(causal_primal_attention, **chosen)
    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True)
    a, counts = randn(H, C, C), chosen["counts"]
    q, k, *_, bias, q_before, k_before = tensors
    rest = counts, MASKS["empty"], "cosine", "elu"
    given = q, k, a, a, bias, q_before, k_before, *rest
    ops = torch.ops.primal_attention
    opcheck(ops.causal_primal_forward, (*given, True))
    *grads, nothing, _ = ops.causal_primal_forward(*(detached(x) for x in given), False)
    given = [detached(x) for x in given]
    opcheck(
        ops.causal_primal_backward, (*given, nothing, nothing, grads[0], None, None, None, None)
    )


def detached(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def opcheck(op, arguments):
    assert set(torch.library.opcheck(op.default, arguments).values()) == {"SUCCESS"}
