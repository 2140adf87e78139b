import pytest
import torch

from primal_attention.ops.landmarks.choice import landmark_index
from primal_attention.ops.sampled.composed import backward_composed, forward_composed

from .formulas import randn, token_masks
from .fused import DEVICES, TOLERANCES, assert_bits, assert_near, in_double, poisoned_memory
from .padding import assert_laid_out

fused = pytest.importorskip("primal_attention.ops.sampled.triton", exc_type=ImportError)
from primal_attention.ops.landmarks import triton as fused_landmarks  # noqa: E402 - needs triton

B, N, H, P, S, C, M = 3, 37, 2, 5, 7, 11, 13
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

    def __init__(self, device, dtype=torch.float32, *, without=(), **sizes):
        heads, width, directions, columns, count, length = (
            sizes.get(name, default)
            for name, default in (("H", H), ("P", P), ("S", S), ("C", C), ("M", M), ("N", N))
        )
        generator = torch.Generator().manual_seed(4)
        index = torch.randint(-1, length, (B, count), generator=generator)
        index[0] = index[0].sort().values
        index[1] = -1
        c_e, c_r = (part.mT for part in randn(columns, 2 * directions, seed=3).chunk(2, 1))
        weights, a = (B, heads, width, directions), (B, heads, width, columns)
        tensors = {
            "x": randn(B, length, heads * width).to(dtype),
            "index": index,
            "w_e": randn(heads, count, directions, seed=1).float(),
            "w_r": randn(heads, count, directions, seed=2).float(),
            "c_e": c_e.float(),
            "c_r": c_r.float(),
            "d_e": randn(*weights, seed=5).float(),
            "d_r": randn(*weights, seed=6).float(),
            "da_e": randn(*a, seed=7).float(),
            "da_r": randn(*a, seed=8).float(),
        }
        self.tensors = {k: None if k in without else t.to(device) for k, t in tensors.items()}
        self.scale = 1.25

    def forward(self):
        return *list(self.tensors.values())[:6], self.scale

    def backward(self):
        e, r, *_ = forward_composed(*self.forward())
        return *self.forward(), e, r, *list(self.tensors.values())[6:]


def check(case):
    """Values and all gradients against float64, laid out as the compiler is told."""
    tolerance = TOLERANCES[case.tensors["x"].dtype]
    values = fused.forward(*case.forward())
    assert_near(values, in_double(forward_composed, case.forward()), tolerance, "value")
    assert_laid_out(values, forward_composed(*case.forward()))
    gradients = fused.backward(*case.backward())
    assert_near(gradients, in_double(backward_composed, case.backward()), tolerance, "gradient")
    assert_laid_out(gradients, backward_composed(*case.backward()))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("without", [(), ("c_e", "da_e"), ("c_r", "da_r"), ("d_e", "da_r")])
def test_values_and_gradients(device, dtype, without):
    check(Case(device, dtype, without=without))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"H": 1, "P": 64, "S": 30, "C": 64, "M": 61}, torch.bfloat16),
        ({"H": 1, "P": 33, "S": 5, "C": 40, "M": 33}, torch.float32),
        ({"H": 1, "P": 17, "S": 70, "C": 40}, torch.bfloat16),
        ({"M": 1, "N": 1}, torch.float32),
        ({"H": 1, "M": 67, "N": 3}, torch.float16),
        ({"H": 1, "N": 131}, torch.bfloat16),
    ],
    ids=str,
)
def test_sizes(device, sizes, dtype):
    check(Case(device, dtype, **sizes))


def test_groups_of_the_sequences(device, monkeypatch):
    """Two sequences and the third one: three blocks of two heads, both sides of each."""
    few = fused.CONFIGS["bf16x6"]._replace(block=16, programs=18)
    monkeypatch.setitem(fused.CONFIGS, "bf16x6", few)
    check(Case(device, P=17, M=33))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_sides_in_one_program(device, dtype, monkeypatch):
    monkeypatch.setattr(fused, "FEW", 1)
    check(Case(device, dtype))


@pytest.mark.parametrize("few", [1, fused.FEW])
def test_parameters_in_half_precision(device, few, monkeypatch):
    monkeypatch.setattr(fused, "FEW", few)
    case = Case(device, torch.bfloat16)
    for name in ("w_e", "w_r", "c_e", "c_r"):
        case.tensors[name] = case.tensors[name].bfloat16()
    check(case)


def test_bfloat16_tokens_lose_little_of_the_parameters(device):
    """A hundredth of what rounding them to bfloat16 would lose, a quarter beside the maps."""
    case = Case(device, torch.bfloat16)
    found, expected = (
        fused.forward(*case.forward()),
        in_double(forward_composed, case.forward()),
    )
    assert_near(found[:2], expected[:2], 2e-5)
    assert_near(found[2:], expected[2:], 5e-4)


def test_views(device):
    case = Case(device)
    x = case.tensors["x"]
    wide = torch.stack([x, x], 2).flatten(2)[:, :, : H * P]
    for view in (wide, x.mT.contiguous().mT):
        assert not view.is_contiguous()
        case.tensors["x"] = view
        check(case)
    case.tensors["index"] = case.tensors["index"].mT.contiguous().mT
    for name in ("w_e", "d_r", "da_e"):
        case.tensors[name] = case.tensors[name].mT.contiguous().mT
    check(case)


def test_what_is_no_landmark_is_never_read(device):
    case = Case(device)
    x, index = case.tensors["x"], case.tensors["index"]
    taken = (index[:, :, None] == torch.arange(N, device=device)).any(1)
    clean = fused.forward(*case.forward())
    clean_gradients = fused.backward(*case.backward())
    given = case.backward()[1:]
    bad = torch.where(taken[..., None], x, float("nan"))
    assert_bits(fused.forward(bad, *case.forward()[1:]), clean)
    assert_bits(fused.backward(bad, *given), clean_gradients)
    assert not clean_gradients[0][~taken].any()
    assert clean_gradients[0][taken].all()


def test_the_same_bits_every_time(device):
    case = Case(device, torch.bfloat16, P=33)
    assert_bits(fused.forward(*case.forward()), fused.forward(*case.forward()))
    assert_bits(fused.backward(*case.backward()), fused.backward(*case.backward()))


def test_what_the_fused_op_does_not_take(device):
    case = Case(device).forward()
    assert fused.takes(*case)
    x, index, w_e, w_r, *rest = case
    assert not fused.takes(x.double(), index, w_e, w_r, *rest)
    assert not fused.takes(x, index, w_e.double(), w_r.double(), *rest)
    assert not fused.takes(x[:0], index[:0], w_e, w_r, *rest)
    wide = w_e[..., :1].expand(H, M, 129)
    assert not fused.takes(x, index, wide, wide, *rest)


@pytest.mark.parametrize("count", [1, 33])
@pytest.mark.parametrize("mask", ["none", "padded", "holes", "empty"])
def test_landmarks_have_the_same_integers(device, mask, count):
    length = 301
    x, token_mask = torch.zeros(B, length, 3), token_masks(B, length)[mask]
    moves, drops = (
        torch.rand(B, count, generator=torch.Generator().manual_seed(i)) for i in (1, 2)
    )
    for jitter, dropout in ((0.0, 0.0), (1.7, 0.0), (0.3, 0.4)):
        drawn = moves if jitter else None, drops if dropout else None
        arguments = x, token_mask, *drawn, count, jitter, dropout
        on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        found = fused_landmarks.landmark_index(*on_device)
        assert_bits([found.cpu()], [landmark_index(*arguments)])


def test_halves_are_rounded_to_even_numbers(device):
    """Offsets of exactly half a token: eleven landmarks on 21 tokens, moved by half a spacing."""
    x = torch.zeros(1, 21, 3)
    moves = torch.tensor([[0.25, 0.75, 0.0, 0.5, 0.125, 0.875, 0.375, 0.625, 0.3, 0.7, 0.9]])
    for jitter in (0.25, 0.5, 0.75, 1.25, 5.0):
        arguments = x, None, moves, None, 11, jitter, 0.0
        on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        found = fused_landmarks.landmark_index(*on_device)
        assert_bits([found.cpu()], [landmark_index(*arguments)])
