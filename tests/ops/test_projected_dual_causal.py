import pytest
import torch

from primal_attention.ops.dual_causal import dual_causal_attention
from primal_attention.ops.projected_dual_causal import projected_dual_causal_attention, reference
from primal_attention.ops.projected_dual_causal.composed import (
    backward_composed,
    forward_composed,
)
from primal_attention.ops.running_mean import token_counts

from .formulas import assert_identical, assert_same, gradients, randn, token_masks
from .fused import DEVICES, TOLERANCES, assert_bits, assert_near, in_double, poisoned_memory
from .padding import assert_laid_out

fused = pytest.importorskip(
    "primal_attention.ops.projected_dual_causal.triton", exc_type=ImportError
)

B, N, H, P, S, C, D = 3, 23, 2, 5, 7, 11, 13
R = 2 * H * (P + S)
MASKS = token_masks(B, N)
__all__ = ["poisoned_memory"]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def inputs(*, scores="both", bias=True, dtype=torch.float64):
    """Tokens and parameters; the last is the bias of the scores."""
    c_e, c_r = (part.mT for part in randn(C, 2 * S, seed=3).chunk(2, 1))
    tensors = [
        randn(B, N, D),
        randn(R, D, seed=6),
        randn(R, seed=7) if bias else None,
        c_e if scores != "r" else None,
        c_r if scores != "e" else None,
        randn(C, seed=8) if bias else None,
    ]
    return [None if t is None else t.to(dtype) for t in tensors]


def op(**options):
    return lambda *tensors: projected_dual_causal_attention(*tensors, num_heads=H, **options)


def whole(*, token_mask=None, map_q="cosine", map_k="cosine"):
    def function(*tensors):
        return reference.projected_dual_causal_attention(*tensors, H, token_mask, map_q, map_k)

    return function


def apart(*, token_mask=None, map_q="cosine", map_k="cosine"):
    """Three projections and the op without them, as a layer has it."""

    def function(x, weight, shift, c_e, c_r, bias):
        sizes = [H * P, H * P, 2 * H * S]
        shifts = [0.0] * 3 if shift is None else shift.split(sizes)
        q, k, h = (x @ w.mT + b for w, b in zip(weight.split(sizes), shifts, strict=True))
        q, k, h = q.unflatten(-1, (H, P)), k.unflatten(-1, (H, P)), h.unflatten(-1, (2, H, S))
        counts = token_counts(q, token_mask, None)
        options = {"token_mask": token_mask, "map_q": map_q, "map_k": map_k}
        found = dual_causal_attention(q, k, h, c_e, c_r, bias, None, None, counts=counts, **options)
        n = counts[:, -1].clamp(min=1)[:, None, None, None]
        return found.out, found.gram_q, found.gram_k, found.k_side / n, found.q_side / n

    return function


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("scores", "bias"), [("both", True), ("e", False), ("r", True)])
def test_it_is_the_formula(scores, bias, mask):
    given = inputs(scores=scores, bias=bias)
    options = {"token_mask": MASKS[mask], "map_q": "elu"}
    assert_same(op(**options), whole(**options), given)
    assert_same(op(**options), apart(**options), given)


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
    assert not op(gram_q=False, gram_k=False)(*inputs()).gram_k.numel()


def test_no_token_sees_a_later_one():
    x, *rest = inputs()
    later = torch.where(torch.arange(N)[:, None] < 9, x, 2.0 * x)
    one, other = (op()(tokens, *rest).out for tokens in (x, later))
    assert torch.equal(one[:, :9], other[:, :9])
    assert (one[:, 9:] != other[:, 9:]).any()


def test_what_stands_at_masked_tokens_reaches_nothing():
    mask, given = MASKS["empty"], inputs()
    bad = torch.where(mask[..., None], given[0], float("nan"))
    clean = op(token_mask=mask)(*given)
    assert_bits(op(token_mask=mask)(bad, *given[1:]), clean)
    _, (dx, *_) = gradients(op(token_mask=mask), given)
    assert not dx[~mask].any()
    assert dx[mask].any()


def test_tokens_in_another_dtype_are_refused():
    x, *rest = (t.bfloat16() for t in inputs())
    with pytest.raises(RuntimeError, match="same dtype"):
        op()(x.float(), *rest)


def test_autocast_does_not_reach_into_it():
    given = inputs(dtype=torch.float32)
    plain = gradients(op(), given)
    with torch.autocast("cpu", torch.bfloat16):
        assert_identical(gradients(op(), given), plain)


def test_gradcheck():
    leaves = [t.requires_grad_() for t in inputs()]
    function = op(token_mask=MASKS["holes"], map_k="elu")
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize(("scores", "dtype"), [("both", torch.float32), ("r", torch.bfloat16)])
def test_opcheck(scores, dtype):
    ops = torch.ops.primal_attention
    given, dtypes = inputs(scores=scores, bias=scores == "both"), [dtype] * 3 + [torch.float32] * 3
    tensors = [None if t is None else t.to(d) for t, d in zip(given, dtypes, strict=True)]
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    options = H, MASKS["holes"], "cosine", "elu"
    forward = ops.projected_dual_causal_forward, (*leaves, *options, True, False)
    out, gram_q, _, *kept = forward[0](*tensors, *options, True, False)
    d_outputs = [torch.randn_like(t) for t in (out, gram_q, *kept[:2])]
    d_outputs.insert(2, None)
    wanted = scores != "r", scores != "e"
    backward = ops.projected_dual_causal_backward, (
        *tensors, *options, *kept, *d_outputs, *wanted
    )  # fmt: skip
    for function, arguments in (forward, backward):
        results = torch.library.opcheck(function.default, arguments)
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "scores", "mask"),
    [
        (torch.float32, "both", "holes"),
        (torch.bfloat16, "both", "none"),
        (torch.float16, "r", "empty"),
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_the_fused_form(device, dtype, scores, mask):
    x, weight, shift, *rest = inputs(scores=scores, dtype=torch.float32)
    tensors = [x.to(dtype), weight.to(dtype), shift.to(dtype), *rest]
    tensors = [None if t is None else t.to(device) for t in tensors]
    token_mask = None if MASKS[mask] is None else MASKS[mask].to(device)
    options = H, token_mask, "cosine", "cosine"
    given = *tensors, *options, True, True
    assert fused.takes(*given)
    values = fused.forward(*given)
    expected = in_double(forward_composed, given)
    assert_near(values[:5], expected[:5], TOLERANCES[dtype], "value")
    d_outputs = [randn(*t.shape, seed=20 + i).to(t) for i, t in enumerate(values[:5])]
    gradients = fused.backward(*tensors, *options, *values[3:], *d_outputs, True, True)
    wide = [None if t is None else t.double() for t in tensors]
    exact = *wide, *options, *expected[3:], *(d.double() for d in d_outputs), True, True
    assert_near(gradients, backward_composed(*exact), TOLERANCES[dtype], "gradient")
    in_pieces = forward_composed(*given)
    assert_laid_out(values[:6], in_pieces[:6])
    rest = *in_pieces[3:], *d_outputs, True, True
    assert_laid_out(gradients, backward_composed(*tensors, *options, *rest))


def test_what_the_fused_form_does_not_take():
    options = H, None, "cosine", "cosine"
    x, weight, *rest = inputs()
    assert not fused.takes(x, weight, *rest, *options)
    x, weight, *rest = inputs(dtype=torch.float32)
    assert fused.takes(x, weight, *rest, *options)
    assert not fused.takes(x[:0], weight, *rest, *options)
    assert not fused.takes(x, torch.zeros(2 * H * (129 + S), D), *rest, *options)
