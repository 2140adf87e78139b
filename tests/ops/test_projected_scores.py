"""Projections and scores as one op: in pieces, with masks, means and landmarks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.ops import chunks, products
from primal_attention.ops.landmarks import choose_landmarks
from primal_attention.ops.projected_scores import projected_scores, reference

from .formulas import MASKS, B, C, H, N, S, assert_close, assert_same, gradients, randn
from .padding import assert_laid_out

D, M = H * C, 11
KINDS = ("static", "causal", "sampled")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Of 16 tokens."""
    monkeypatch.setattr(chunks, "_ELEMENTS", {"cpu": 1, "cuda": 1})


def inputs(kind, length=N, batch=B, bias=True):
    rows = M if kind == "sampled" else C
    shift = randn(2 * D, seed=2) if bias else None
    x, weight = randn(batch, length, D), randn(2 * D, D, seed=1) / D**0.5
    return [x, weight, shift, randn(H, rows, S, seed=3), randn(H, rows, S, seed=4)]


def both(kind, mask=None, maps=("cosine", "cosine")):
    """The op and the reference."""

    def ours(x, *tensors):
        landmarks = None
        if kind == "sampled":
            landmarks = choose_landmarks(x, M, token_mask=mask)._replace(scale=1.25)
        options = {"causal": kind == "causal", "token_mask": mask}
        return projected_scores(x, *tensors, landmarks, **options, map_q=maps[0], map_k=maps[1])

    def wanted(x, *tensors):
        index = scale = None
        if kind == "sampled":
            index, scale = choose_landmarks(x, M, token_mask=mask).positions, 1.25
        return reference.projected_scores(
            *[x, *tensors], index, scale, kind == "causal", mask, *maps
        )

    return ours, wanted


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("maps", [("cosine", "cosine"), ("elu", "relu"), ("identity", "identity")])
@pytest.mark.parametrize("kind", KINDS)
def test_it_equals_the_reference(kind, maps, mask, bias):
    assert_same(*both(kind, MASKS[mask], maps), inputs(kind, bias=bias))


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    batch=st.sampled_from((1, 2, 3, 7)),
    length=st.sampled_from((1, 15, 16, 17, 37)),
    piece=st.sampled_from((1, 1 << 9, 1 << 11, 1 << 20)),
    seed=st.integers(0, 99),
)
def test_any_sizes_in_any_pieces(kind, batch, length, piece, seed):
    mask = randn(batch, length, seed=seed) < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "_ELEMENTS", {"cpu": piece, "cuda": 1})
        assert_same(*both(kind, mask), inputs(kind, length, batch))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_of_one_output_alone(kind):
    for used in range(5):
        ours, wanted = (lambda *x, op=op, used=used: (op(*x)[used],) for op in both(kind))
        assert_same(ours, wanted, inputs(kind))


@pytest.mark.parametrize("frozen", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_need_no_gradient(kind, frozen):
    tensors = [x.requires_grad_(i != frozen) for i, x in enumerate(inputs(kind))]
    wanted = [x for x in tensors if x.requires_grad]
    ours, plain = (
        torch.autograd.grad(op(*tensors).scores.square().sum(), wanted) for op in both(kind)
    )
    for one, other in zip(ours, plain, strict=True):
        assert_close(one, other)


def test_the_tokens_may_be_a_view():
    def transposed(op):
        return lambda x, *tensors: op(x.transpose(0, 1), *tensors)

    x, *tensors = inputs("sampled")
    ours, wanted = (transposed(op) for op in both("sampled"))
    assert_same(ours, wanted, [x.transpose(0, 1).contiguous(), *tensors])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_large_products_by_onednn(kind, bias, monkeypatch):
    monkeypatch.setattr(products, "_LARGE", 0)
    ours, wanted = both(kind, MASKS["holes"])
    tensors = inputs(kind, bias=bias)
    narrow = [x if x is None else x.float() for x in tensors]
    narrow[0] = narrow[0].transpose(0, 1).contiguous().transpose(0, 1)  # a view of other strides
    by_onednn, eager, exact = (
        [each for part in gradients(*run) for each in part]
        for run in ((ours, narrow), (wanted, narrow), (wanted, tensors))
    )
    for one, other, right in zip(by_onednn, eager, exact, strict=True):
        assert (one - right).norm() <= 2 * (other - right).norm() + 1e-7 * right.norm()


def test_causal_scores_see_no_later_token():
    ours, _ = both("causal")
    x, *tensors = inputs("causal")
    for t in (1, 15, 16, 17, N - 1):
        poisoned = x.clone()
        poisoned[:, t:] = float("nan")
        assert torch.equal(ours(poisoned, *tensors).scores[:, :t], ours(x, *tensors).scores[:, :t])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_passed_over(kind):
    """The same as the sequence without it, in values and gradients."""
    x, *tensors = inputs(kind, batch=1)
    mask = torch.ones(1, N + 5, dtype=torch.bool)
    mask[:, [0, 7, 8, N, N + 4]] = False
    padded = torch.zeros(1, N + 5, D, dtype=x.dtype)
    padded[mask] = x[0]
    outputs, grads = gradients(lambda *t: both(kind)[0](*t)[:2], [x, *tensors])

    def run(*given):
        scores, energies, *_ = both(kind, mask)[0](*given)
        return scores[mask][None], energies

    got, got_grads = gradients(run, [padded, *tensors])
    for one, other in zip(got, outputs, strict=True):
        assert_close(one, other)
    assert not got_grads[0][~mask].any()
    assert_close(got_grads[0][mask], grads[0][0])
    for one, other in zip(got_grads[1:], grads[1:], strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients(kind):
    tensors = [x.requires_grad_() for x in inputs(kind, 5)]
    ours, _ = both(kind, MASKS["holes"][:, :5])
    assert torch.autograd.gradgradcheck(lambda *x: ours(*x)[:2], tensors, fast_mode=True)


def arguments(kind, mask):
    x, *tensors = inputs(kind)
    index = choose_landmarks(x, M, token_mask=mask).positions if kind == "sampled" else None
    return [x, *tensors], (index, 1.25, kind == "causal", mask, "cosine", "elu")


@pytest.mark.parametrize("mask", ["none", "empty"])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, mask):
    ops = torch.ops.primal_attention
    tensors, options = arguments(kind, MASKS[mask])
    leaves = [x.detach().requires_grad_() for x in tensors]
    results = torch.library.opcheck(ops.projected_scores_forward.default, (*leaves, *options))
    assert set(results.values()) == {"SUCCESS"}, results
    scores, energies, qk, e, r = ops.projected_scores_forward(*tensors, *options)
    d_outputs = [randn(*y.shape, seed=7) for y in (scores, energies, qk, e, r)]
    given = *tensors, *options, scores, qk, e, r, *d_outputs, True, True
    results = torch.library.opcheck(ops.projected_scores_backward.default, given)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("kind", KINDS)
def test_the_compiler_is_told_the_layout(kind):
    forward = torch.ops.primal_attention.projected_scores_forward
    tensors, options = arguments(kind, MASKS["holes"])
    with torch._subclasses.FakeTensorMode() as mode:

        def fake(each):
            return mode.from_tensor(each) if isinstance(each, torch.Tensor) else each

        expected = forward(*map(fake, tensors), *map(fake, options))
    assert_laid_out(forward(*tensors, *options), expected)
