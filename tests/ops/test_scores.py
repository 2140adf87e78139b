"""Scores and their energies: by their formula, in pieces, at masked tokens, in half precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.ops import chunks
from primal_attention.ops.scores import primal_scores, reference

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
    gradients,
    randn,
    real,
)
from .padding import assert_laid_out

SHARED = {"batched": (B, H, C, S), "shared": (H, C, S)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})


def inputs(length=N, weights="batched", dtype=torch.float64):
    shape = SHARED[weights]
    tensors = 2 * randn(B, length, 2, H, C), randn(*shape, seed=1), randn(*shape, seed=2)
    return [each.to(dtype) for each in tensors]


def dense_scores(qk, w_e, w_r, *, token_mask=None, map_q="cosine", map_k="cosine"):
    """e_i = W_e^T phi_q(x_i), r_i = W_r^T phi_k(x_i), and the sums of their squares."""
    maps, scores = (MAPS[map_q], MAPS[map_k]), torch.zeros(*qk.shape[:-1], S).to(qk)
    for b, i, side, h in torch.cartesian_prod(*map(torch.arange, qk.shape[:-1])):
        if real(token_mask, b, i):
            w = (w_e, w_r)[side]
            w = w[b, h] if w.ndim == 4 else w[h]
            where = torch.zeros(scores.shape[:-1]).to(qk)
            where[b, i, side, h] = 1
            scores = scores + where[..., None] * (w.mT @ maps[side](qk[b, i, side, h]))
    return scores, scores.square().sum(1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("feature_map", MAPS)
def test_the_reference_is_the_formula(feature_map, mask):
    options = {"token_mask": MASKS[mask], "map_q": feature_map, "map_k": "relu"}
    tensors = inputs(weights="shared")
    tensors[0] = tensors[0][:, :, :, :1]
    tensors = [tensors[0], *(w[:1] for w in tensors[1:])]
    got, want = reference.primal_scores(*tensors, **options), dense_scores(*tensors, **options)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weights", SHARED)
@pytest.mark.parametrize("maps", [*((name, name) for name in MAPS), ("cosine", "elu")])
def test_in_pieces_they_equal_the_reference(maps, weights, mask):
    options = {"token_mask": MASKS[mask], "map_q": maps[0], "map_k": maps[1]}
    assert_same(
        lambda *x: primal_scores(*x, **options),
        lambda *x: reference.primal_scores(*x, **options),
        inputs(weights=weights),
    )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.tuples(*(st.sampled_from((1, 2, 3, 5, 7)) for _ in range(4))),
    length=st.sampled_from((1, 15, 16, 17, 37)),
    piece=st.sampled_from((1, 1 << 8, 1 << 18)),
    seed=st.integers(0, 99),
)
def test_any_sizes(sizes, length, piece, seed):
    batch, heads, width, directions = sizes
    shape = batch, heads, width, directions
    qk = randn(batch, length, 2, heads, width, seed=seed)
    qk += 0.1 * qk.sign()  # near zero gradients grow as 1 / |z|, and so do their rounding errors
    qk[0, 0] = 0.0  # a token without a direction
    weights = randn(*shape, seed=seed + 1), randn(*shape, seed=seed + 2)
    mask = randn(batch, length, seed=seed + 3) < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_ELEMENTS", {"cpu": piece, "cuda": 1})
        assert_same(
            lambda *x: primal_scores(*x, token_mask=mask),
            lambda *x: reference.primal_scores(*x, mask),
            [qk, *weights],
        )


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_of_one_output_alone(used):
    def one(op):
        return lambda *x: (op(*x)[used],)

    assert_same(one(primal_scores), one(reference.primal_scores), inputs())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("feature_map", MAPS)
def test_what_stands_at_masked_tokens_reaches_nothing(feature_map, bad):
    mask, (qk, *weights) = MASKS["empty"], inputs()
    poisoned = torch.where(mask[:, :, None, None, None], qk, bad)

    def run(*x):
        return primal_scores(*x, token_mask=mask, map_q=feature_map, map_k=feature_map)

    outputs, grads = gradients(run, [poisoned, *weights])
    assert_identical((outputs, grads), gradients(run, [qk, *weights]))
    assert not outputs[0][~mask].any() and not grads[0][~mask].any()
    assert outputs[0][mask].any() and grads[0][mask].any()


def test_gradients_that_stand_at_masked_tokens_reach_nothing():
    mask, tensors = MASKS["empty"], [x.requires_grad_() for x in inputs()]
    scores, energies = primal_scores(*tensors, token_mask=mask)
    d_scores, d_energies = randn(*scores.shape, seed=5), randn(*energies.shape, seed=6)
    poisoned = torch.where(mask[:, :, None, None, None], d_scores, float("nan"))
    results = [
        torch.autograd.grad([scores, energies], tensors, [d, d_energies], retain_graph=True)
        for d in (d_scores, poisoned)
    ]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature_map", MAPS)
def test_errors_are_no_larger_than_those_of_the_reference(feature_map, dtype):
    tensors = inputs(length=211, dtype=dtype)
    maps = {"map_q": feature_map, "map_k": feature_map}
    want = gradients(lambda *x: reference.primal_scores(*x, **maps), [x.double() for x in tensors])
    ours, eager = (
        gradients(lambda *x, op=op: op(*x, **maps), tensors)
        for op in (primal_scores, reference.primal_scores)
    )
    triples = zip([*ours[0], *ours[1]], [*eager[0], *eager[1]], [*want[0], *want[1]], strict=True)
    for one, other, exact in triples:
        assert one.dtype == other.dtype
        step = torch.finfo(one.dtype).eps * exact.abs().max()
        assert (one - exact).abs().max() <= 2 * (other - exact).abs().max() + step


@pytest.mark.parametrize("weights", SHARED)
def test_gradients_of_gradients(weights):
    tensors = [x.requires_grad_() for x in inputs(5, weights)]
    mask = MASKS["holes"][:, :5]
    assert torch.autograd.gradgradcheck(
        lambda *x: primal_scores(*x, token_mask=mask), tensors, fast_mode=True
    )


@pytest.mark.parametrize("mask", ["none", "empty"])
@pytest.mark.parametrize("weights", SHARED)
def test_opcheck(weights, mask):
    ops, options = torch.ops.primal_attention, (MASKS[mask], "cosine", "elu")
    tensors = inputs(weights=weights)
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = torch.library.opcheck(ops.scores_forward.default, (*leaves, *options))
    assert set(results.values()) == {"SUCCESS"}, results
    outputs = ops.scores_forward(*tensors, *options)
    d_outputs = [randn(*x.shape, seed=7) for x in outputs]
    arguments = *tensors, *options, outputs[0], *d_outputs
    results = torch.library.opcheck(ops.scores_backward.default, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


def test_the_compiler_is_told_the_layout():
    tensors = inputs()
    qk = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)  # not the usual one
    with torch._subclasses.FakeTensorMode() as mode:
        fake = primal_scores(*(mode.from_tensor(x) for x in (qk, *tensors[1:])))
    assert_laid_out(primal_scores(qk, *tensors[1:]), fake)
