import pytest
import torch

from primal_attention.ops.projected_dual import projected_dual_attention, reference

from .formulas import (
    MAPS,
    assert_identical,
    assert_same,
    dense_moment,
    dense_primal,
    gradients,
    randn,
    token_masks,
)

B, N, H, P, S, C, D = 3, 23, 2, 5, 7, 11, 13
R = 2 * H * (P + S)
MASKS = token_masks(B, N)


def inputs(*, scores="both", bias=True):
    """Tokens and parameters; the last is the bias of the scores."""
    c_e, c_r = (part.mT for part in randn(C, 2 * S, seed=3).chunk(2, 1))
    return [
        randn(B, N, D),
        randn(R, D, seed=6),
        randn(R, seed=7) if bias else None,
        c_e if scores != "r" else None,
        c_r if scores != "e" else None,
        randn(C, seed=8) if bias else None,
    ]


def op(**options):
    return lambda *tensors: projected_dual_attention(*tensors, num_heads=H, **options)


def dense(*, token_mask=None, map_q="cosine", map_k="cosine"):
    """Token by token."""

    def function(x, weight, shift, c_e, c_r, bias):
        rows = x @ weight.mT if shift is None else x @ weight.mT + shift
        q, k = (z.unflatten(-1, (H, P)) for z in rows[..., : 2 * H * P].chunk(2, -1))
        h_e, h_r = (z.unflatten(-1, (H, S)) for z in rows[..., 2 * H * P :].chunk(2, -1))
        n = torch.full((B,), N) if token_mask is None else token_mask.sum(1).clamp(min=1)
        (w_e,) = dense_moment(k, h_r, token_mask=token_mask, feature_map=map_k)
        (w_r,) = dense_moment(q, h_e, token_mask=token_mask, feature_map=map_q)
        w_e, w_r = (w / n[:, None, None, None] for w in (w_e, w_r))
        options = {"token_mask": token_mask, "map_q": map_q, "map_k": map_k}
        return *dense_primal(q, k, w_e, w_r, c_e, c_r, bias, **options), w_e, w_r

    return function


def whole(*, token_mask=None, map_q="cosine", map_k="cosine"):
    def function(*tensors):
        return reference.projected_dual_attention(*tensors, H, token_mask, map_q, map_k)

    return function


@pytest.mark.parametrize("mask", ["none", "empty"])
@pytest.mark.parametrize(("scores", "bias"), [("both", True), ("e", False), ("r", True)])
def test_it_is_the_formula(scores, bias, mask):
    given = inputs(scores=scores, bias=bias)
    options = {"token_mask": MASKS[mask], "map_q": "elu"}
    assert_same(op(**options), dense(**options), given)
    assert_same(whole(**options), dense(**options), given)


@pytest.mark.parametrize("map_q", MAPS)
@pytest.mark.parametrize("map_k", MAPS)
@pytest.mark.parametrize("mask", MASKS)
def test_maps_and_masks(map_q, map_k, mask):
    options = {"token_mask": MASKS[mask], "map_q": map_q, "map_k": map_k}
    assert_same(op(**options), whole(**options), inputs())


@pytest.mark.parametrize("only", range(5))
def test_outputs_of_which_one_is_used(only):
    """The other gradients are missing in the backward pass."""
    assert_same(
        lambda *x: op()(*x)[only : only + 1], lambda *x: whole()(*x)[only : only + 1], inputs()
    )


def test_gram_matrices_that_are_not_wanted():
    _, gram_q, gram_k, *_ = op(gram_q=False)(*inputs())
    assert not gram_q.numel()
    assert gram_k.shape == (B, H, P, P)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2, 3), (3, 4, 5)])
def test_frozen_inputs(frozen):
    """What needs no gradient gets none, and the others keep theirs."""
    given = inputs()
    _, expected = gradients(op(), given)
    leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(given)]
    outputs = op()(*leaves)
    cotangents = [randn(*out.shape, seed=90 + i) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, cotangents)
    for i, (leaf, grad) in enumerate(zip(leaves, expected, strict=True)):
        assert leaf.grad is None if i in frozen else torch.allclose(leaf.grad, grad)


def test_a_batch_without_sequences():
    x, *rest = inputs()
    outputs, grads = gradients(op(), [x[:0], *rest])
    assert outputs[0].shape == (0, N, H, C)
    assert outputs[3].shape == (0, H, P, S)
    assert not any(grad.any() for grad in grads[1:])


def test_what_stands_at_masked_tokens_reaches_nothing():
    """The layer zeroes such tokens, so that their products with gradients, zero too, are zero."""
    mask, given = MASKS["empty"], inputs()
    bad = torch.where(mask[..., None], given[0], float("nan"))
    clean = op(token_mask=mask)(*given)
    for one, other in zip(op(token_mask=mask)(bad, *given[1:]), clean, strict=True):
        assert torch.equal(one, other)
    assert not clean.out[~mask].any()
    _, (dx, *_) = gradients(op(token_mask=mask), given)
    assert not dx[~mask].any()
    assert dx[mask].any()


def test_tokens_of_half_precision():
    """As under autocast: tokens and projection are bfloat16, the small matrices float32."""
    low = [t.bfloat16() if i < 3 else t.float() for i, t in enumerate(inputs())]
    outputs, grads = gradients(op(), low)
    exact_outputs, exact_grads = gradients(whole(), [t.double() for t in low])
    assert [t.dtype for t in outputs] == [torch.bfloat16, *[torch.float32] * 4]
    assert [t.dtype for t in grads] == [t.dtype for t in low]
    for one, other in zip([*outputs, *grads], [*exact_outputs, *exact_grads], strict=True):
        assert (one - other).norm() < 2e-2 * other.norm()


def test_tokens_in_another_dtype_are_refused():
    x, *rest = (t.bfloat16() for t in inputs())
    with pytest.raises(RuntimeError, match="same dtype"):
        op()(x.float(), *rest)


def test_autocast_does_not_reach_into_it():
    given = [t.float() for t in inputs()]
    plain = gradients(op(), given)
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical(gradients(op(), given), plain)


def test_the_same_bits_every_time():
    given = [t.float() for t in inputs()]
    assert_identical(gradients(op(), given), gradients(op(), given))


def test_gradcheck():
    leaves = [t.requires_grad_() for t in inputs()]
    function = op(token_mask=MASKS["holes"], map_k="elu")
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize(
    ("scores", "dtype"),
    [("both", torch.float32), ("e", torch.float32), ("r", torch.bfloat16)],
)
def test_opcheck(scores, dtype):
    ops = torch.ops.primal_attention
    given, dtypes = inputs(scores=scores, bias=scores == "both"), [dtype] * 3 + [torch.float32] * 3
    tensors = [None if t is None else t.to(d) for t, d in zip(given, dtypes, strict=True)]
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    options = H, MASKS["holes"], "cosine", "elu"
    forward = ops.projected_dual_forward.default, (*leaves, *options, True, False)
    out, gram_q, _, e, r, *kept = ops.projected_dual_forward(*tensors, *options, True, False)
    d_outputs = [torch.randn_like(t) for t in (out, gram_q, e, r)]
    d_outputs.insert(2, None)
    backward = ops.projected_dual_backward.default, (
        *tensors, *options, e, r, *kept, *d_outputs, scores != "r", scores != "e", False
    )  # fmt: skip
    for function, arguments in (forward, backward):
        results = torch.library.opcheck(function, arguments)
        assert set(results.values()) == {"SUCCESS"}, results
