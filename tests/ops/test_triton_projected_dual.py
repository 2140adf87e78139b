from itertools import pairwise

import pytest
import torch

from primal_attention.ops.projected_dual import projected_dual_attention
from primal_attention.ops.projected_dual.composed import backward_composed, forward_composed

from .formulas import MAPS, randn, token_masks
from .fused import (
    DEVICES,
    TOLERANCES,
    assert_bits,
    assert_near,
    in_double,
    poisoned_memory,
)
from .padding import assert_laid_out

fused = pytest.importorskip("primal_attention.ops.projected_dual.triton", exc_type=ImportError)

B, N, H, P, S, C, D = 2, 23, 3, 5, 7, 11, 13
MASKS = token_masks(B, N)
TENSORS = ["x", "weight", "shift", "c_e", "c_r", "bias"]
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over tokens.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


class Case:
    """Inputs and cotangents of one call."""

    def __init__(self, device, dtype=torch.float32, *, without=(), **options):
        sizes = {"N": N, "H": H, "P": P, "S": S, "C": C} | options
        length, self.heads, width, S_, C_ = (sizes[name] for name in "NHPSC")
        R = 2 * self.heads * (width + S_)
        c_e, c_r = (part.mT for part in randn(C_, 2 * S_, seed=3).chunk(2, 1))
        tensors = {
            "x": randn(B, length, D).to(dtype),
            "weight": randn(R, D, seed=1).to(dtype),
            "shift": randn(R, seed=2).to(dtype),
            "c_e": c_e.float(),
            "c_r": c_r.float(),
            "bias": randn(C_, seed=6).float(),
            "d_out": randn(B, length, self.heads, C_, seed=7).to(dtype),
            "d_gram_q": randn(B, self.heads, width, width, seed=8).float(),
            "d_gram_k": randn(B, self.heads, width, width, seed=9).float(),
            "d_e": randn(B, self.heads, width, S_, seed=10).float(),
            "d_r": randn(B, self.heads, width, S_, seed=11).float(),
        }
        tensors = {k: None if k in without else t.to(device) for k, t in tensors.items()}
        self.inputs = [tensors[name] for name in TENSORS]
        self.cotangents = [t for name, t in tensors.items() if name not in TENSORS]
        self.mask = options.get("mask")
        self.mask = None if self.mask is None else self.mask.to(device)
        self.maps = options.get("maps", ("cosine", "cosine"))
        self.wanted = options.get("wanted", (True, True))

    def forward(self):
        return *self.inputs, self.heads, self.mask, *self.maps, True, True

    def backward(self, *, spent=False):
        _, _, _, e, r, *kept = forward_composed(*self.forward())
        return *self.forward()[:-2], e, r, *kept, *self.cotangents, *self.wanted, spent

    def in_double(self):
        """The same in float64."""
        wide = Case.__new__(Case)
        wide.__dict__.update(self.__dict__)
        wide.inputs, wide.cotangents = (
            [None if t is None else t.double() for t in group]
            for group in (self.inputs, self.cotangents)
        )
        return wide


def check(case):
    """Values and all gradients against float64, laid out as the compiler is told."""
    tolerance = TOLERANCES[case.inputs[1].dtype]
    values = fused.forward(*case.forward())
    assert_laid_out(values, forward_composed(*case.forward()))
    assert_near(values[:5], in_double(forward_composed, case.forward())[:5], tolerance, "value")
    given = case.backward()
    gradients = fused.backward(*given)
    assert_laid_out(gradients, backward_composed(*given))
    expected = backward_composed(*case.in_double().backward())
    assert_near(gradients, expected, tolerance, "gradient")
    if case.mask is not None:
        assert not gradients[0][~case.mask].any()


@pytest.mark.parametrize(
    ("dtype", "without", "mask"),
    [
        (torch.bfloat16, (), "empty"),
        (torch.float16, ("c_e",), "holes"),
        (torch.float32, ("c_r", "shift"), "none"),
        (torch.float32, ("bias", "d_e", "d_gram_q"), "padded"),
        (torch.float32, ("d_out", "d_r"), "holes"),
        (torch.float32, ("d_out", "d_e", "d_r"), "none"),
    ],
)
def test_values_and_gradients(device, dtype, without, mask):
    check(Case(device, dtype, without=without, mask=MASKS[mask]))


@pytest.fixture
def in_one_pass(monkeypatch):
    """Sequences of any number and dtype have programs of their own."""
    monkeypatch.setattr(fused, "MANY", 1)
    monkeypatch.setattr(fused, "WHOLE", fused.ROWS)
    monkeypatch.setattr(fused, "_sum_sides", None)
    monkeypatch.setattr(fused, "attend_after", None)


@pytest.mark.parametrize(
    ("dtype", "without", "options"),
    [
        (torch.bfloat16, (), {"mask": MASKS["empty"]}),
        (torch.float16, ("bias",), {"mask": MASKS["holes"]}),
        (torch.float32, ("shift", "d_e", "d_gram_q"), {"mask": MASKS["padded"]}),
        (torch.float32, ("d_r", "d_gram_k"), {"maps": ("elu", "relu")}),
        (torch.bfloat16, (), {"H": 1, "N": 67, "P": 64, "S": 30, "C": 64}),
    ],
)
@pytest.mark.usefixtures("in_one_pass")
def test_short_sequences(device, dtype, without, options):
    check(Case(device, dtype, without=without, **options))


@pytest.mark.usefixtures("in_one_pass")
def test_short_sequences_in_the_place_of_their_rows(device):
    case = Case(device, mask=MASKS["holes"])
    given = case.backward(spent=True)
    rows = given[12].clone()
    assert_bits(fused.backward(*given), fused.backward(*case.backward()))
    assert not torch.equal(given[12], rows)


@pytest.mark.parametrize(
    ("without", "options"),
    [(("c_e",), {}), (("c_r",), {}), ((), {"N": 257, "H": 1}), ((), {"H": 1, "P": 40})],
    ids=str,
)
def test_what_takes_two_passes_however_many_sequences(device, without, options, monkeypatch):
    monkeypatch.setattr(fused, "MANY", 1)
    monkeypatch.setattr(fused, "WHOLE", fused.ROWS)
    monkeypatch.setattr(fused, "_attend_whole", None)
    monkeypatch.setattr(fused, "_write_whole", None)
    check(Case(device, without=without, **options))


@pytest.mark.parametrize("maps", list(pairwise([*MAPS, "cosine"])))
def test_maps(device, maps):
    check(Case(device, mask=MASKS["holes"], maps=maps, H=1))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"H": 1, "P": 64, "S": 30, "C": 64}, torch.bfloat16),
        ({"H": 1, "P": 70, "S": 5, "C": 70}, torch.float16),  # wide heads go side by side
        ({"H": 1, "S": 129}, torch.float32),  # the weights are composed
        ({"N": 1, "H": 1}, torch.float32),
    ],
    ids=str,
)
def test_sizes(device, sizes, dtype):
    check(Case(device, dtype, **sizes))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_wanted(device, wanted):
    some, all_of_them = (
        fused.backward(*Case(device, wanted=each, H=1).backward())
        for each in (wanted, (True, True))
    )
    for number, (one, other) in enumerate(zip(some, all_of_them, strict=True)):
        if number < 2 and not wanted[number]:
            assert not one.numel()
        else:
            assert_bits([one], [other])


def test_parameters_in_half_precision(device):
    case = Case(device, torch.bfloat16, H=1)
    case.inputs = [t.bfloat16() for t in case.inputs]
    check(case)


def test_what_stands_at_masked_tokens_reaches_nothing(device):
    """Neither of x, whose rows are not read there, nor of the gradient of the outputs."""
    mask = MASKS["empty"].to(device)
    case, bad = (Case(device, mask=mask, H=1) for _ in range(2))
    bad.inputs[0][~mask] = float("nan")
    bad.cotangents[0][~mask] = float("nan")
    assert_bits(fused.forward(*bad.forward())[:5], fused.forward(*case.forward())[:5])
    dx, _, d_shift, *small = fused.backward(*bad.backward())
    expected = fused.backward(*case.backward())
    assert_bits([dx, d_shift, *small], [expected[0], *expected[2:]])


def test_the_same_bits_every_time(device):
    case = Case(device, torch.bfloat16, P=33, H=1, mask=MASKS["holes"])
    assert_bits(fused.forward(*case.forward()), fused.forward(*case.forward()))
    assert_bits(fused.backward(*case.backward()), fused.backward(*case.backward()))


@pytest.mark.parametrize(("width", "directions"), [(P, S), (40, S), (P, 40)])
def test_gradients_in_the_place_of_the_rows(device, width, directions):
    """The same bits; wide heads and many directions, which are read twice, are not written over."""
    case = Case(device, P=width, S=directions, H=1, mask=MASKS["holes"])
    given = case.backward(spent=True)
    rows = given[12].clone()
    assert_bits(fused.backward(*given), fused.backward(*case.backward()))
    assert torch.equal(given[12], rows) == ((width, directions) != (P, S))


def test_a_graph_that_is_kept_gives_the_same_gradients_again(device):
    leaves = [t.detach().requires_grad_() for t in Case(device).inputs]
    outputs = projected_dual_attention(*leaves, num_heads=H)
    cotangents = [torch.ones_like(output) for output in outputs]
    first, second = (
        torch.autograd.grad(outputs, leaves, cotangents, retain_graph=keep)
        for keep in (True, False)
    )
    assert_bits(first, second)


def test_what_the_fused_op_does_not_take(device):
    def takes(dtype=torch.float32, **options):
        return fused.takes(*Case(device, dtype, **options).forward())

    assert takes()
    assert takes(without=("c_e",))
    assert not takes(torch.float64)
    assert not takes(C=257)
    assert not takes(P=257, H=1)
    assert not takes(N=0)


@pytest.mark.parametrize("device", DEVICES[1:])  # the op has no fused form on a CPU
def test_the_op_runs_fused_on_a_gpu(device, monkeypatch):
    """Through autograd, and only there: float64 is composed."""
    calls = []
    for name in ("forward", "backward"):
        run = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *x, run=run, name=name: calls.append(name) or run(*x)
        )
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in Case(device).inputs]
        result = projected_dual_attention(*leaves, num_heads=H)
        sum(out.square().sum() for out in result).backward()
        gradients[dtype] = [leaf.grad for leaf in leaves]
    assert calls == ["forward", "backward"]
    assert_near(gradients[torch.float32], gradients[torch.float64], 1e-5)
