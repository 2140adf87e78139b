"""Fused scans against the same in plain PyTorch."""

import math
from typing import NamedTuple

import pytest
import torch

from primal_attention.ops.causal import scan
from primal_attention.ops.causal.eager import ScanInputs
from primal_attention.ops.op import fused_ops

from .formulas import dense_timed, gradients, randn, token_masks
from .fused import (
    DEVICES,
    INTERPRETED,
    TOLERANCES,
    assert_bits,
    assert_near,
    assert_same_as_eager,
    error,
    poisoned_memory,
)

B, H = 2, 2
HALVES = [torch.bfloat16, torch.float16]
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over tokens.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def mask_of(name, length, device):
    if name == "none":
        return None
    mask = token_masks(B, length)[name]
    return None if mask is None else mask[:, :, None].to(device)


class Case(NamedTuple):
    """A scan in two directions where ``future``."""

    sides: int
    timed: bool
    future: bool
    mask: str
    maps: tuple[str, str]
    dtype: torch.dtype = torch.float32
    length: int = 37
    width: int = 5
    columns: int = 7
    half_life: float = 10.0
    with_state: bool = True

    def tensors(self, device):
        """Rows of both sides, values, steps and the state."""
        z = 2 * randn(2, H, B, self.length, self.width)
        values = randn(self.sides, H, B, self.length, self.columns, seed=2)
        state = randn(self.sides, H, B, self.width, self.columns, seed=3)
        rate = 2 * math.log(2.0) / self.half_life
        steps = rate * torch.rand(H, B, self.length, generator=torch.Generator().manual_seed(4))
        return [
            z.to(self.dtype).to(device),
            values.to(self.dtype).to(device),
            steps.float().to(device) if self.timed else None,
            state.float().to(device) if self.with_state else None,
        ]

    def run(self, z, values, steps, state):
        """Return the outputs and the sums after the last token."""
        mask = mask_of(self.mask, self.length, z.device)
        options = {"steps": steps, "future": self.future}
        return scan(z, values, self.maps, mask, state, **options)

    def formula(self, z, values, steps):
        """The dense sums of the kernel."""
        mask = mask_of(self.mask, self.length, z.device)
        mask = None if mask is None else mask[:, :, 0]
        steps = steps if mask is None else torch.where(mask, steps, 0.0)
        return dense_timed(z, values, steps, self.maps, mask, future=self.future)

    def out(self, z, values, steps):
        """Return the outputs that the dense formula gives too, without a state."""
        outputs = self.run(z, values, steps, None)
        return outputs[:1] if self.future else outputs

    def check(self, device, tolerance=1e-6, **options):
        """Values and gradients against the eager form."""
        assert_same_as_eager(self.run, self.tensors(device), tolerance, **options)


SCANS = {
    "two sides": Case(2, True, False, "empty", ("unit_elu", "unit_elu")),
    "two sides, both ways": Case(2, True, True, "holes", ("cosine", "unit_elu")),
    "two sides, no time": Case(2, False, False, "empty", ("identity", "elu")),
    "one side": Case(1, False, False, "empty", ("cosine", "cosine")),
    "one side, no mask": Case(1, False, False, "none", ("elu", "relu")),
    "one side, timed": Case(1, True, False, "padded", ("relu", "identity")),
    "one side, timed, both ways": Case(1, True, True, "empty", ("elu", "cosine")),
}
BOTH_WAYS = SCANS["two sides, both ways"]


@pytest.mark.parametrize("name", SCANS)
def test_scans(device, name):
    SCANS[name].check(device)


SIZES = [(1, 2, 1), (16, 16, 16), (17, 5, 33), (48, 64, 3)]


@pytest.mark.parametrize("sizes", SIZES)
def test_scans_of_any_size(device, sizes):
    length, width, columns = sizes
    case = BOTH_WAYS._replace(mask="none", length=length, width=width, columns=columns)
    case.check(device, 2e-6)


def test_sums_of_many_entries(device):
    """More of them than one program carries."""
    case = Case(1, False, False, "none", ("elu", "elu"), torch.float16, 19, 64, 67)
    case.check(device, TOLERANCES[torch.float16])


@pytest.mark.parametrize("skipped", [(0,), (1,)])
@pytest.mark.parametrize("name", ["one side, timed", "two sides, both ways"])
def test_scans_in_several_segments(device, name, skipped, monkeypatch):
    monkeypatch.setattr("primal_attention.ops.triton.launch.SHORTEST", 1)
    SCANS[name].check(device, skipped=skipped)


@pytest.mark.parametrize("half_life", [1e-2, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("future", [False, True])
def test_short_and_long_half_lives(device, half_life, future):
    """Gradients of time lose no digits, and what is forgotten within a token does no harm."""
    case = Case(2, True, future, "none", ("unit_elu", "cosine"), half_life=half_life)
    case.check(device, 1e-6 if half_life >= 1 else 2e-5)
    *given, _ = case.tensors(device)
    with fused_ops("always"):
        found = gradients(case.out, given)
    expected = gradients(case.formula, [x.double() for x in given])
    for one, other in zip(found, expected, strict=True):
        assert_near(one[:3], other[:3], 1e-6 if half_life >= 1 else 2e-5)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_errors_are_at_most_twice_those_of_the_formula_in_this_dtype(device, dtype):
    case = BOTH_WAYS._replace(dtype=dtype, width=16, columns=8, with_state=False, mask="none")
    *given, _ = case.tensors(device)
    errors = []
    expected = gradients(case.formula, [x.double() for x in given])

    for run in (case.out, case.formula):
        with fused_ops("always"):
            found = gradients(run, given)
        pairs = zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True)
        errors.append([error(*pair) for pair in pairs])
    truncates = INTERPRETED and dtype == torch.bfloat16  # which doubles the error of each rounding
    for mine, plain in zip(*errors, strict=True):
        assert mine <= (4 if truncates else 2) * plain + 1e-7


def test_a_state_goes_on(device):
    """Two halves with a state between them are the whole."""
    case = Case(2, True, False, "none", ("unit_elu", "unit_elu"), with_state=False)
    z, values, steps, _ = case.tensors(device)
    with fused_ops("always"):
        whole, after = case.run(z, values, steps, None)
        parts, state = [], None
        for part in (slice(21), slice(21, None)):
            rows = z[..., part, :], values[..., part, :], steps[..., part]
            read, state = case.run(*rows, state)
            parts.append(read)
    assert_near([torch.cat(parts, -2), state], [whole.double(), after.double()], 1e-6)


def test_padded_tokens_may_hold_anything(device):
    """Infinities and NaN in padded rows reach neither outputs nor gradients."""
    z, values, steps, state = BOTH_WAYS.tensors(device)
    padded = ~mask_of("holes", BOTH_WAYS.length, device)
    clean = z, values, steps, state
    spoilt = [
        z.masked_fill(padded, float("nan")),
        values.masked_fill(padded, float("inf")),
        steps.masked_fill(padded[:, :, 0], float("nan")),
        state,
    ]
    with fused_ops("always"):
        (ys, grads), (expected, d_expected) = (gradients(BOTH_WAYS.run, x) for x in (spoilt, clean))
    assert_bits([*ys, *grads], [*expected, *d_expected])


def test_rows_with_gaps(device):
    z, values, steps, state = BOTH_WAYS.tensors(device)
    gaps = [torch.stack((x, x), -1)[..., 0] for x in (z, values, steps, state)]
    with fused_ops("always"):
        found, expected = (BOTH_WAYS.run(*x) for x in (gaps, (z, values, steps, state)))
    assert_bits(found, expected)


class OnThisDevice:
    """A backend whose op is registered for the device of the tests too."""

    device_type = "cpu"

    def __init__(self):
        from primal_attention.ops.causal.fused_scan import ScanOp

        members = {"name": "scan_on_cpu", "devices": ("cpu", "cuda")}
        self.op = type("ScanOnCPU", (ScanOp,), members)()

    def find(self, name):
        return self.op if name == "scan" else None


def test_compiled_and_registered(device, monkeypatch):
    """The compiler is told the truth of shapes and dtypes, and gets the same gradients."""
    backend = OnThisDevice()
    monkeypatch.setattr("primal_attention.ops.op.BACKENDS", {"cpu": backend})
    case = BOTH_WAYS._replace(length=5, mask="none")
    results = []
    compiled = torch.compile(case.run, backend="aot_eager", fullgraph=True, dynamic=True)
    for function in (compiled, case.run):
        with fused_ops("always"):
            outputs, grads = gradients(function, case.tensors(device))
        results.append([*outputs, *grads])
    assert_near(results[0], [x.double() for x in results[1]], 1e-6)
    z, values, steps, state = (x.requires_grad_() for x in case.tensors(device))
    given = ScanInputs(
        z.permute(0, 2, 3, 1, 4), values.permute(2, 3, 0, 1, 4), state.permute(2, 1, 0, 3, 4),
        steps.permute(1, 2, 0), None, *case.maps, True,
    )  # fmt: skip
    torch.library.opcheck(
        backend.op.registered, tuple(given),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


def test_recorded_passes_are_repeated(device, monkeypatch):
    """The third call and those after it repeat what the second has done."""
    monkeypatch.setattr("primal_attention.ops.op.REPLAYED", {"cpu", "cuda"})
    case = BOTH_WAYS._replace(length=9)
    given = case.tensors(device)
    with fused_ops("always"):
        gradients(case.run, given), gradients(case.run, given)
        other = [x.roll(1, -1) for x in given]
        found = gradients(case.run, other)
    with fused_ops("never"):
        expected = gradients(case.run, [x.double() for x in other])
    for one, exact in zip(found, expected, strict=True):
        assert_near(one, exact, 1e-6)


LAYERS = {
    "primal_time": {"num_directions": 3},
    "primal": {"num_directions": 3, "weights": "dual", "decay": "fixed", "rotary": True},
    "linear": {"decay": "learned"},
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_a_time_give_the_same_fused(device, name, causal):
    """The layers of the package, with their objective, by the op and in plain PyTorch."""
    from primal_attention import build_attention, ksvd_loss

    torch.manual_seed(0)
    module = build_attention(name, 12, 2, causal=causal, **LAYERS[name]).to(device)
    mask = token_masks(B, 19)["holes"].to(device)
    x = randn(B, 19, 12).float().to(device).requires_grad_()
    results = []
    for when in ("always", "never"):
        with fused_ops(when):
            y = module(x, token_mask=mask)
            loss = y.square().sum() + (0 if name == "linear" else ksvd_loss(module))
            grads = torch.autograd.grad(loss, [x, *module.parameters()])
        results.append([y.detach(), loss.detach()[None], *grads])
    assert_near(results[0], [t.double() for t in results[1]], 2e-5)


def test_gradients_of_gradients(device):
    """By the eager form."""
    case = BOTH_WAYS._replace(length=5, width=3, columns=2)
    tensors = [x.requires_grad_() for x in case.tensors(device)]

    def penalty(*given):
        read, after = case.run(*given)
        loss = read.square().sum() + after.square().sum()
        found = torch.autograd.grad(loss, given, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in found), given)

    with fused_ops("always"):
        found = penalty(*tensors)
    with fused_ops("never"):
        expected = penalty(*(x.detach().double().requires_grad_() for x in tensors))
    assert_near(found, expected, 1e-5)


def test_what_a_scan_supports():
    from primal_attention.ops.triton.backend import OPS

    def supported(**options):
        case = BOTH_WAYS._replace(**options)
        z, values, *_ = case.tensors("meta")
        rows = z.permute(0, 2, 3, 1, 4), values.permute(2, 3, 0, 1, 4)
        return OPS["scan"].supports(ScanInputs(*rows, None, None, None, *case.maps, False))

    assert supported()
    assert not supported(dtype=torch.float64)
    assert not supported(width=257)
    assert not supported(maps=("cosine", "exponential"))
