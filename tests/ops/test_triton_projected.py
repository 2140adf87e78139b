import pytest
import torch

from primal_attention.ops.landmarks.choice import landmark_index
from primal_attention.ops.projected import projected_attention
from primal_attention.ops.projected.composed import backward_composed, forward_composed

from .formulas import MAPS, randn, token_masks
from .fused import DEVICES, TOLERANCES, assert_bits, assert_near, in_double, poisoned_memory
from .padding import assert_laid_out

fused = pytest.importorskip("primal_attention.ops.projected.triton", exc_type=ImportError)
primal = pytest.importorskip("primal_attention.ops.primal.triton", exc_type=ImportError)
Config = primal.Config

B, N, H, P, S, C, M = 3, 37, 2, 5, 7, 11, 13
MASKS, MASKS_67 = token_masks(B, N), token_masks(B, 67)
TENSORS = ["x", "weight", "shift", "w_e", "w_r", "c_e", "c_r", "bias"]
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
    """Inputs and cotangents of one call; M=None for static weights."""

    def __init__(self, device, dtype=torch.float32, *, without=(), **options):
        sizes = {"N": N, "H": H, "P": P, "S": S, "C": C, "M": M} | options
        length, heads, width, S_, C_, count = (sizes[name] for name in "NHPSCM")
        D, rows = heads * width, width if count is None else count
        lead = (heads, width) if count is None else (B, heads, width)
        c_e, c_r = (part.mT for part in randn(C_, 2 * S_, seed=3).chunk(2, 1))
        tensors = {
            "x": randn(B, length, D).to(dtype),
            "weight": randn(2 * D, D, seed=1).to(dtype),
            "shift": randn(2 * D, seed=2).to(dtype),
            "w_e": randn(heads, rows, S_, seed=4).float(),
            "w_r": randn(heads, rows, S_, seed=5).float(),
            "c_e": c_e.float(),
            "c_r": c_r.float(),
            "bias": randn(C_, seed=6).float(),
            "d_out": randn(B, length, heads, C_, seed=7).to(dtype),
            "d_gram_q": randn(B, heads, width, width, seed=8).float(),
            "d_gram_k": randn(B, heads, width, width, seed=9).float(),
            "d_e": randn(*lead, S_, seed=10).float(),
            "d_r": randn(*lead, S_, seed=11).float(),
        }
        tensors = {k: None if k in without else t.to(device) for k, t in tensors.items()}
        self.inputs = [tensors[name] for name in TENSORS]
        self.cotangents = [t for name, t in tensors.items() if name not in TENSORS]
        self.mask = options.get("mask")
        self.mask = None if self.mask is None else self.mask.to(device)
        self.index = None if count is None else self.landmarks(length, count, **options).to(device)
        self.maps = options.get("maps", ("cosine", "cosine"))
        self.wanted = options.get("wanted", (True, True))
        self.causal = options.get("causal", False)

    def landmarks(self, length, count, *, jitter=None, mask=None, **_):
        generator = torch.Generator().manual_seed(4)
        moves, drops = (torch.rand(B, count, generator=generator) for _ in range(2))
        if jitter is not None:
            x = torch.zeros(B, length, 1)
            return landmark_index(x, mask, moves, drops, count, jitter, 0.2)
        index = (moves * length).long()  # in no order
        return torch.where(drops < 0.1, -1, index)

    def forward(self):
        options = self.index, 1.25, self.causal, self.mask
        return *self.inputs, *options, *self.maps, True, True

    def backward(self, *, spent=False):
        _, _, _, e, r, *kept = forward_composed(*self.forward())
        return *self.forward()[:-2], e, r, *kept, *self.cotangents, *self.wanted, spent


def double_backward_inputs(case):
    """All in float64, with what the forward pass keeps made anew."""
    wide = Case.__new__(Case)
    wide.__dict__.update(case.__dict__)
    wide.inputs, wide.cotangents = (
        [None if t is None else t.double() for t in group]
        for group in (case.inputs, case.cotangents)
    )
    return wide.backward()


def check(case, tolerance=None):
    """Values and all gradients against float64, laid out as the compiler is told."""
    tolerance = tolerance or TOLERANCES[case.inputs[1].dtype]
    values, plain = fused.forward(*case.forward()), forward_composed(*case.forward())
    assert_laid_out(values, plain)
    wide = in_double(forward_composed, case.forward())
    assert_near(values[:5], wide[:5], tolerance, "value")
    given = case.backward()
    gradients = fused.backward(*given)
    assert_laid_out(gradients, backward_composed(*given))
    expected = backward_composed(*double_backward_inputs(case))
    assert_near(gradients, expected, tolerance, "gradient")


@pytest.mark.parametrize(
    ("dtype", "without"),
    [
        (torch.bfloat16, ()),
        (torch.float16, ("c_e",)),
        (torch.float32, ("c_r", "shift")),
        (torch.float32, ("bias", "d_e", "d_gram_q")),
        (torch.bfloat16, ("d_out",)),
    ],
)
@pytest.mark.parametrize("count", [None, M])
def test_values_and_gradients(device, dtype, count, without):
    check(Case(device, dtype, M=count, without=without, mask=MASKS["empty"]))


@pytest.mark.parametrize("feature_map", MAPS)
def test_maps(device, feature_map):
    check(Case(device, M=None, mask=MASKS["holes"], maps=(feature_map, "elu")))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"H": 1, "P": 64, "S": 30, "C": 64, "M": 61}, torch.bfloat16),
        ({"H": 1, "P": 64, "S": 30, "C": 64, "M": None}, torch.bfloat16),
        ({"H": 1, "P": 70, "S": 5, "C": 70, "M": 3}, torch.float16),  # wide heads go side by side
        ({"H": 1, "S": 129, "M": 3}, torch.float32),  # the weights are composed
        ({"H": 1, "S": 129, "M": None}, torch.float32),
        ({"M": 1, "N": 1}, torch.float32),
        ({"M": 1}, torch.float32),
        ({"H": 1, "M": 67, "N": 3}, torch.float16),
    ],
    ids=str,
)
def test_sizes(device, sizes, dtype):
    check(Case(device, dtype, **sizes))


@pytest.mark.parametrize(
    ("mask", "dtype", "without"),
    [
        ("none", torch.bfloat16, ()),
        ("holes", torch.float32, ("c_e", "shift")),
        ("empty", torch.float16, ("d_out",)),
    ],
)
def test_causal(device, mask, dtype, without):
    check(Case(device, dtype, causal=True, M=None, N=67, without=without, mask=MASKS_67[mask]))


def test_causal_in_several_shares(device, monkeypatch):
    """The backward pass adds up what the walk after it starts from, so that no other pass does."""
    small = Config(block=16, tile=16, num_warps=4, num_stages=1, programs=2 * B * H, least=1)
    monkeypatch.setitem(primal.BACKWARD[torch.bfloat16], 16, small)
    segment_sums, kinds = fused.running_mean.segment_sums, []

    def recorded(*given):
        kinds.append(given[-1])
        return segment_sums(*given)

    monkeypatch.setattr(fused.running_mean, "segment_sums", recorded)
    check(Case(device, torch.bfloat16, causal=True, M=None, mask=MASKS["holes"]))
    assert kinds
    assert not any(kind["BACKWARD"] for kind in kinds)


@pytest.mark.parametrize(
    ("mask", "jitter", "count"),
    [("holes", 3.7, 67), ("empty", 3.7, 7), ("none", 0.0, 67), ("holes", 0.0, 7)],
)
def test_landmarks_that_meet(device, mask, jitter, count):
    check(Case(device, M=count, jitter=jitter, mask=MASKS[mask]))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_gradients_that_are_not_wanted(device, wanted):
    some, all_of_them = (
        fused.backward(*Case(device, wanted=each).backward()) for each in (wanted, (True, True))
    )
    for number, (one, other) in enumerate(zip(some, all_of_them, strict=True)):
        if number < 2 and not wanted[number]:
            assert not one.numel()
        else:
            assert_bits([one], [other])


def test_parameters_in_half_precision(device):
    for count in (None, 3):
        case = Case(device, torch.bfloat16, M=count)
        case.inputs = [t.bfloat16() for t in case.inputs]
        check(case)


@pytest.mark.parametrize(("count", "causal"), [(None, False), (None, True), (M, False)])
def test_the_same_bits_every_time(device, count, causal):
    options = {"M": count, "causal": causal, "mask": MASKS["holes"]}
    case = Case(device, torch.bfloat16, P=33, H=1, **options)
    assert_bits(fused.forward(*case.forward()), fused.forward(*case.forward()))
    assert_bits(fused.backward(*case.backward()), fused.backward(*case.backward()))


def test_what_the_fused_op_does_not_take(device):
    def takes(dtype=torch.float32, **options):
        return fused.takes(*Case(device, dtype, **options).forward())

    assert takes()
    assert takes(M=None, without=("c_e",))
    assert not takes(torch.float64)
    assert not takes(C=257)
    assert not takes(P=257, H=1, M=None)
    assert not takes(N=0, M=None)


@pytest.mark.parametrize("device", DEVICES[1:])  # the op has no fused form on a CPU
def test_the_op_runs_fused_on_a_gpu(device, monkeypatch):
    """Through autograd, and only there: float64 is composed."""
    from primal_attention.ops.landmarks import Landmarks
    from primal_attention.ops.projected import projected_attention

    calls = []
    for name in ("forward", "backward"):
        run = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *x, run=run, name=name: calls.append(name) or run(*x)
        )
    gradients = {}
    for dtype in (torch.float32, torch.float64):
        case = Case(device)
        leaves = [t.to(dtype).requires_grad_() for t in case.inputs]
        landmarks = Landmarks(leaves[0], case.index)
        result = projected_attention(*leaves, landmarks)
        sum(out.square().sum() for out in result).backward()
        gradients[dtype] = [leaf.grad for leaf in leaves]
    assert calls == ["forward", "backward"]
    assert_near(gradients[torch.float32], gradients[torch.float64], 1e-5)


@pytest.mark.parametrize(
    ("width", "options"),
    [(P, {"M": None}), (P, {}), (P, {"M": None, "causal": True}), (40, {"M": None, "H": 1})],
)
def test_gradients_that_are_written_over_what_was_kept(device, width, options):
    """The same bits; wide heads, which are read twice, are not written over."""
    case = Case(device, P=width, mask=MASKS["holes"], **options)
    given = case.backward(spent=True)
    gradients = fused.backward(*given)
    assert_bits(gradients, fused.backward(*case.backward()))
    for one, other in zip(given[16:19], case.backward()[16:19], strict=True):  # q and k, A_e, A_r
        assert torch.equal(one, other) == (width != P)


def test_a_graph_that_is_kept_gives_the_same_gradients_again(device):
    leaves = [t.detach().requires_grad_() for t in Case(device, M=None).inputs]
    outputs = projected_attention(*leaves)
    cotangents = [torch.ones_like(output) for output in outputs]
    first, second = (
        torch.autograd.grad(outputs, leaves, cotangents, retain_graph=keep)
        for keep in (True, False)
    )
    assert_bits(first, second)
