import pytest
import torch

from primal_attention.ops import launch
from primal_attention.ops.scan import chunked

from .formulas import randn
from .fused import DEVICES, TOLERANCES, assert_near, poisoned_memory
from .padding import assert_laid_out, holes, in_float64, poisoned

fused = pytest.importorskip("primal_attention.ops.scan.triton", exc_type=ImportError)

B, N, H, P, S, V = 2, 37, 1, 5, 3, 7
__all__ = ["poisoned_memory"]
pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # interpreter
    pytest.mark.parametrize("device", DEVICES),
]


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Blocks of 16 tokens, two segments of a sequence of three blocks."""
    monkeypatch.setattr(launch, "PROGRAMS", 2 * B * H)
    monkeypatch.setattr(launch, "SHORTEST", 1)
    for table in ("FORWARD", "BACKWARD"):
        small = {key: launch.Config(16, 4, 1) for key in getattr(fused, table)}
        monkeypatch.setattr(fused, table, small)


def inputs(device, dtype=torch.float32, *, length=N, dims=(P, S, V), value_map=True, state=True):
    p, s, v = dims
    s = s if value_map else v
    q, k = randn(B, length, H, 2 * p).to(device, dtype).split(p, -1)
    h = randn(B, length, H, s, seed=1).to(device, dtype)
    c = randn(s, v, seed=2).to(device, torch.float32) if value_map else None
    before = randn(B, H, p, v, seed=3).to(device, torch.float32) if state else None
    return q, k, h, c, before


def assert_both_passes(tensors, mask=None, maps=("cosine", "cosine")):
    q, k, h, c, before = tensors
    width, tolerance = (h if c is None else c).shape[-1], 2 * TOLERANCES[q.dtype]
    d_out = randn(*q.shape[:3], width, seed=4).to(q.device, torch.float32)
    d_state = randn(B, H, q.shape[-1], width, seed=5).to(q.device, torch.float32)
    bad = *(poisoned(x, mask) for x in (q, k, h)), c, before
    exact = in_float64(*tensors)
    assert_near(
        fused.forward(*bad, mask, *maps),
        chunked.forward_in_pieces(*exact, mask, *maps),
        tolerance,
    )
    assert_near(
        fused.backward(*bad, mask, *maps, poisoned(d_out, mask), d_state),
        chunked.backward_in_pieces(*exact, mask, *maps, *in_float64(d_out, d_state)),
        tolerance,
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("value_map", [True, False])
def test_outputs_states_and_gradients(device, dtype, value_map):
    assert_both_passes(inputs(device, dtype, value_map=value_map), holes(B, N, device))


@pytest.mark.parametrize("state", [True, False])
def test_without_a_mask(device, state):
    assert_both_passes(inputs(device, state=state))


@pytest.mark.parametrize("maps", [("elu", "relu"), ("relu", "identity"), ("identity", "elu")])
def test_every_map(device, maps):
    assert_both_passes(inputs(device), holes(B, N, device), maps)


@pytest.mark.parametrize(
    ("length", "dims"), [(1, (1, 1, 1)), (16, (16, 16, 16)), (17, (67, 3, 5)), (17, (5, 3, 67))]
)
def test_any_size(device, length, dims):
    assert_both_passes(inputs(device, length=length, dims=dims), maps=("elu", "elu"))


@pytest.mark.parametrize("programs", [1, 100])
def test_any_number_of_segments(device, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    assert_both_passes(inputs(device))


def test_columns_need_not_be_adjacent(device):
    q, k, h, c, before = inputs(device)
    q, k, h = (x.mT.contiguous().mT for x in (q, k, h))
    assert_both_passes((q, k, h, c.T.contiguous().T, before.mT.contiguous().mT))


def test_in_two_parts_it_is_the_same(device):
    q, k, h, c, before = inputs(device)
    maps = None, "cosine", "cosine"
    whole, final = fused.forward(q, k, h, c, before, *maps)
    first, between = fused.forward(q[:, :21], k[:, :21], h[:, :21], c, before, *maps)
    second, last = fused.forward(q[:, 21:], k[:, 21:], h[:, 21:], c, between, *maps)
    assert_near([torch.cat([first, second], 1), last], in_float64(whole, final), 1e-6)


@pytest.mark.parametrize("value_map", [True, False])
def test_the_layout_is_the_one_that_is_announced(device, value_map):
    q, k, h, c, before = inputs(device, torch.bfloat16, value_map=value_map)
    q, c = q.mT.contiguous().mT, c if c is None else c.T.contiguous().T
    given = q, k, h, c, before, None, "cosine", "elu"
    out, final = fused.forward(*given)
    assert_laid_out([out, final], chunked._empty_outputs(*given))
    assert_laid_out(fused.backward(*given, out, final), chunked._empty_gradients(*given))


def test_what_it_takes(device):
    def takes(p, v, dtype=torch.bfloat16):
        z, values = (torch.zeros(1, 2, 1, x, dtype=dtype, device=device) for x in (p, v))
        return fused.takes(z, z, values)

    assert takes(128, 128)
    assert takes(256, 64)
    assert takes(64, 256)
    assert takes(1, 1)
    assert not takes(257, 16)
    assert not takes(256, 256)
    assert not takes(128, 64, torch.float32)
    assert not takes(16, 16, torch.float64)
