import pytest
import torch

from primal_attention.ops.landmarks import Landmarks, choose_landmarks
from primal_attention.ops.projected import projected_attention, reference

from .formulas import (
    MAPS,
    assert_identical,
    assert_same,
    dense_primal,
    gradients,
    randn,
    token_masks,
)

B, N, H, P, S, C, M = 3, 23, 2, 5, 7, 11, 13
D = H * P
MASKS = token_masks(B, N)


def inputs(num_landmarks=M, *, sampled=True, scores="both", bias=True):
    """Tokens and parameters; the last is the bias of the scores."""
    rows = num_landmarks if sampled else P
    c_e, c_r = (part.mT for part in randn(C, 2 * S, seed=3).chunk(2, 1))
    return [
        randn(B, N, D),
        randn(2 * D, D, seed=6),
        randn(2 * D, seed=7) if bias else None,
        randn(H, rows, S, seed=1),
        randn(H, rows, S, seed=2),
        c_e if scores != "r" else None,
        c_r if scores != "e" else None,
        randn(C, seed=8) if bias else None,
    ]


def scattered(num_landmarks=M):
    """Landmarks in no order, some of them twice and some missing; one sequence has none."""
    index = torch.randint(-1, N, (B, num_landmarks), generator=torch.Generator().manual_seed(4))
    index[:, : num_landmarks // 3] = index[:, :1].clamp(min=0)
    index[1] = -1
    return index


def op(index=None, scale=1.0, **options):
    def function(x, *rest):
        landmarks = None if index is None else Landmarks(x, index, scale)
        return projected_attention(x, *rest, landmarks, **options)

    return function


def dense(index=None, scale=1.0, *, causal=False, token_mask=None, map_q="cosine", map_k="cosine"):
    """Token by token."""

    def function(x, weight, shift, w_e, w_r, c_e, c_r, bias):
        qk = x @ weight.mT if shift is None else x @ weight.mT + shift
        if causal:
            qk = means(qk, token_mask)
        q, k = (z.unflatten(-1, (H, P)) for z in qk.chunk(2, -1))
        if index is not None:
            rows = scale * torch.where(
                index[..., None] >= 0, x[torch.arange(len(x))[:, None], index.clamp(min=0)], 0.0
            )
            x_sampled = rows.unflatten(-1, (H, P)).transpose(1, 2)
            w_e, w_r = x_sampled.mT @ w_e, x_sampled.mT @ w_r
        options = {"token_mask": token_mask, "map_q": map_q, "map_k": map_k}
        return *dense_primal(q, k, w_e, w_r, c_e, c_r, bias, **options), w_e, w_r

    return function


def means(z, token_mask):
    """Of the real tokens up to each."""
    real = torch.ones(B, N, dtype=torch.bool) if token_mask is None else token_mask
    up_to = real[:, None] & torch.ones(N, N, dtype=torch.bool).tril()
    return up_to.to(z) @ z / up_to.sum(2, keepdim=True).clamp(min=1)


def whole(index=None, scale=1.0, *, causal=False, token_mask=None, map_q="cosine", map_k="cosine"):
    def function(*tensors):
        options = index, scale, causal, token_mask, map_q, map_k
        return reference.projected_attention(*tensors, *options)

    return function


@pytest.mark.parametrize("index", [None, scattered()], ids=["static", "sampled"])
@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_formula(index, scores, bias):
    given = inputs(sampled=index is not None, scores=scores, bias=bias)
    options = {"token_mask": MASKS["holes"], "map_q": "elu"}
    assert_same(op(index, 1.25, **options), dense(index, 1.25, **options), given)
    assert_same(whole(index, 1.25, **options), dense(index, 1.25, **options), given)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scores", ["both", "e", "r"])
def test_causal_it_is_the_formula_of_means(scores, mask):
    given = inputs(sampled=False, scores=scores, bias=scores != "r")
    options = {"causal": True, "token_mask": MASKS[mask], "map_k": "elu"}
    assert_same(op(**options), dense(**options), given)
    assert_same(whole(**options), dense(**options), given)


def test_causal_no_token_sees_a_later_one():
    x, *rest = inputs(sampled=False)
    later = torch.where(torch.arange(N)[:, None] < N // 2, x, x + 1)
    one, other = (op(causal=True)(tokens, *rest).out for tokens in (x, later))
    assert torch.equal(one[:, : N // 2], other[:, : N // 2])
    assert not torch.isclose(one[:, N // 2 :], other[:, N // 2 :]).all(-1).any()


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("mask", MASKS)
def test_maps_and_masks(feature_map, mask):
    options = {"token_mask": MASKS[mask], "map_q": feature_map, "map_k": feature_map}
    assert_same(op(scattered(), **options), whole(scattered(), **options), inputs())


@pytest.mark.parametrize("count", [1, 2, 23, 61])
@pytest.mark.parametrize("options", [{}, {"jitter": 1.7}, {"dropout": 0.4}])
def test_of_landmarks(count, options):
    torch.manual_seed(0)
    mask, given = MASKS["empty"], inputs(count)
    _, index, scale = choose_landmarks(given[0], count, token_mask=mask, **options)
    assert_same(op(index, scale, token_mask=mask), whole(index, scale, token_mask=mask), given)


@pytest.mark.parametrize("index", [None, scattered()], ids=["static", "sampled"])
def test_outputs_of_which_not_all_are_used(index):
    """Each alone: the other gradients are missing in the backward pass."""
    given = inputs(sampled=index is not None)
    for only in range(5):
        assert_same(
            lambda *x, only=only: op(index)(*x)[only : only + 1],
            lambda *x, only=only: whole(index)(*x)[only : only + 1],
            given,
        )


def test_gram_matrices_that_are_not_wanted():
    _, gram_q, gram_k, *_ = op(gram_q=False)(*inputs(sampled=False))
    assert not gram_q.numel()
    assert gram_k.shape == (B, H, P, P)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 1, 2, 3, 5)])
@pytest.mark.parametrize("index", [None, scattered()], ids=["static", "sampled"])
def test_frozen_inputs(index, frozen):
    """What needs no gradient gets none, and the others keep theirs."""
    given = inputs(sampled=index is not None)
    _, expected = gradients(op(index), given)
    leaves = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(given)]
    outputs = op(index)(*leaves)
    cotangents = [randn(*out.shape, seed=90 + i) for i, out in enumerate(outputs)]
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    torch.autograd.backward([o for o, _ in pairs], [c for _, c in pairs])
    for i, (leaf, grad) in enumerate(zip(leaves, expected, strict=True)):
        assert leaf.grad is None if i in frozen else torch.allclose(leaf.grad, grad)


def test_a_batch_without_sequences():
    for index in (None, torch.zeros(0, M, dtype=torch.long)):
        x, *rest = inputs(sampled=index is not None)
        for causal in (False, True):
            outputs, grads = gradients(op(index, causal=causal), [x[:0], *rest])
            assert outputs[0].shape == (0, N, H, C)
            assert not any(grad.any() for grad in grads[1:3])


def test_what_stands_at_masked_tokens_reaches_no_output():
    """The layer zeroes such tokens, so that their gradients need not be asked for."""
    mask, given = MASKS["empty"], inputs(sampled=False)
    bad = torch.where(mask[..., None], given[0], float("nan"))
    for causal in (False, True):
        function = op(causal=causal, token_mask=mask)
        clean = function(*given)
        for one, other in zip(function(bad, *given[1:]), clean, strict=True):
            assert torch.equal(one, other)
        assert not clean.out[~mask].any()


@pytest.mark.parametrize("index", [None, scattered()], ids=["static", "sampled"])
def test_tokens_of_half_precision(index):
    """As under autocast: tokens and projection are bfloat16, the small matrices float32."""
    given = inputs(sampled=index is not None)
    low = [t.bfloat16() if i < 3 else t.float() for i, t in enumerate(given)]
    outputs, grads = gradients(op(index), low)
    exact_outputs, exact_grads = gradients(whole(index), [t.double() for t in low])
    assert [t.dtype for t in outputs] == [torch.bfloat16, *[torch.float32] * 4]
    assert [t.dtype for t in grads] == [t.dtype for t in low]
    for one, other in zip([*outputs, *grads], [*exact_outputs, *exact_grads], strict=True):
        assert (one - other).norm() < 2e-2 * other.norm()
    for one, other in zip(outputs[3:], exact_outputs[3:], strict=True):  # sums lose no digits
        assert (one - other).norm() < 1e-6 * other.norm()


def test_tokens_in_another_dtype_are_refused():
    x, *rest = (t.bfloat16() for t in inputs(sampled=False))
    with pytest.raises(RuntimeError, match="same dtype"):
        op()(x.float(), *rest)


def test_autocast_does_not_reach_into_it():
    given = [t.float() for t in inputs()]
    plain = gradients(op(scattered()), given)
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical(gradients(op(scattered()), given), plain)


def test_the_same_bits_every_time():
    given = [t.float() for t in inputs()]
    assert_identical(gradients(op(scattered()), given), gradients(op(scattered()), given))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", [None, scattered()], ids=["static", "sampled"])
def test_gradcheck(index, causal):
    leaves = [t.requires_grad_() for t in inputs(sampled=index is not None)]
    function = op(index, 1.25, causal=causal, token_mask=MASKS["holes"])
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("index", [None, scattered()], ids=["static", "sampled"])
@pytest.mark.parametrize("scores", ["both", "e", "r"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(index, scores, dtype):
    ops = torch.ops.primal_attention
    given = inputs(sampled=index is not None, scores=scores, bias=scores == "both")
    dtypes = [dtype] * 3 + [torch.float32] * 5
    tensors = [None if t is None else t.to(d) for t, d in zip(given, dtypes, strict=True)]
    leaves = [None if t is None else t.requires_grad_() for t in tensors]
    options = index, 1.25, index is None, MASKS["holes"], "cosine", "elu"
    forward = ops.projected_forward.default, (*leaves, *options, True, False)
    tensors = [None if t is None else t.detach() for t in tensors]
    out, gram_q, _, e, r, *kept = ops.projected_forward(*tensors, *options, True, False)
    d_outputs = [torch.randn_like(t) for t in (out, gram_q, e, r)]
    d_outputs.insert(2, None)
    backward = ops.projected_backward.default, (
        *tensors, *options, e, r, *kept, *d_outputs, scores != "r", scores != "e", False
    )  # fmt: skip
    for function, arguments in (forward, backward):
        results = torch.library.opcheck(function, arguments)
        assert set(results.values()) == {"SUCCESS"}, results
