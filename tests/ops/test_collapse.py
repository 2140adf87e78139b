"""A_e = W_e C_e and A_r = W_r C_r: composed, and fused in the interpreter or on a GPU."""

import pytest
import torch

from primal_attention.ops.collapse import collapse
from primal_attention.ops.collapse.composed import collapse_backward, collapse_composed

from .formulas import assert_same, randn
from .fused import DEVICES, TOLERANCES, assert_bits, assert_near, in_double, poisoned_memory
from .padding import assert_laid_out

fused = pytest.importorskip("primal_attention.ops.collapse.triton", exc_type=ImportError)

B, H, P, S, C = 3, 2, 37, 7, 11
LEADS = [(H,), (B, H)]
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over columns.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(lead, *, scores="both", directions=S, device="cpu"):
    weights = [randn(*lead, P, directions, seed=i) for i in (1, 2)]
    c_e, c_r = (part.mT for part in randn(C, 2 * directions, seed=3).chunk(2, 1))
    given = *weights, c_e if scores != "r" else None, c_r if scores != "e" else None
    return [None if t is None else t.float().to(device) for t in given]


def cotangents(given):
    w_e, _, *maps = given
    shape = (*w_e.shape[:-1], C)
    return [None if c is None else randn(*shape, seed=i).to(w_e) for i, c in enumerate(maps, 4)]


def op(*given):
    return torch.ops.primal_attention.collapse_forward(*given)


@pytest.mark.parametrize("lead", LEADS)
def test_it_is_two_products(lead):
    given = [t.double() for t in inputs(lead)]
    for function in (collapse, op):
        assert_same(function, lambda w_e, w_r, c_e, c_r: (w_e @ c_e, w_r @ c_r), given)


def test_what_is_not_output():
    assert collapse(*inputs((H,), scores="e"))[1] is None
    assert collapse(*inputs((H,), scores="r"))[0] is None


def test_gradients_of_gradients():
    leaves = [t.double().requires_grad_() for t in inputs((H,))]
    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(op, leaves, fast_mode=True)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("scores", ["both", "e", "r"])
def test_opcheck(lead, scores):
    given = inputs(lead, scores=scores)
    leaves = [None if t is None else t.requires_grad_() for t in given]
    backward = [None if t is None else t.detach() for t in given] + cotangents(given)
    ops = torch.ops.primal_attention
    for function, arguments in ((ops.collapse_forward, leaves), (ops.collapse_backward, backward)):
        results = torch.library.opcheck(function.default, tuple(arguments))
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(
    ("dtype", "scores"),
    [(torch.float32, "both"), (torch.bfloat16, "both"), (torch.float16, "e"), (torch.float32, "r")],
)
def test_fused(device, lead, dtype, scores):
    given = inputs(lead, scores=scores, device=device)
    given = [None if t is None else t.to(dtype) for t in given]
    values = fused.forward(*given)
    assert_laid_out(values, collapse_composed(*given))
    digits = 1e-6 if dtype == torch.float32 else 5e-4
    assert_near(values, in_double(collapse_composed, given), digits, "value")
    both = [*given, *(None if d is None else d.float() for d in cotangents(given))]
    gradients = fused.backward(*both)
    assert_laid_out(gradients, collapse_backward(*both))
    expected = in_double(collapse_backward, both)
    assert_near(gradients, expected, TOLERANCES[dtype], "gradient")
    assert_bits(gradients, fused.backward(*both))


def test_fused_with_many_directions(device):
    given = inputs((H,), directions=70, device=device)
    assert_near(fused.forward(*given), in_double(collapse_composed, given), 1e-6)
    both = [*given, *cotangents(given)]
    assert_near(fused.backward(*both), in_double(collapse_backward, both), 1e-6)


def test_fused_copies_and_other_uses(device):
    """Weights come back in float32, and gradients of other uses are added to theirs."""
    given = inputs((H,), device=device)
    e, r, *sides = fused.forward_with_weights(*given)
    assert_bits([e, r, *sides], [*given[:2], *fused.forward(*given)])
    others = [randn(H, P, S, seed=i).to(e) for i in (8, 9)]
    plain = fused.backward(*given, *cotangents(given))
    added = fused.backward(*given, *cotangents(given), *others)
    expected = [plain[0] + others[0], plain[1] + others[1], *plain[2:]]
    assert_near(added, [t.double() for t in expected], 1e-6)


def test_what_the_fused_op_does_not_take(device):
    given = inputs((H,), device=device)
    assert fused.takes(*given)
    assert not fused.takes(*(t.double() for t in given))
    assert not fused.takes(*inputs((H,), directions=129, device=device))
    assert not fused.takes(given[0][:0], given[1][:0], *given[2:])
