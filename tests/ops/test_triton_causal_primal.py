import pytest
import torch

from primal_attention.ops import launch
from primal_attention.ops.causal_primal import composed, sizes
from primal_attention.ops.running_mean import token_counts

from .formulas import randn
from .fused import DEVICES, TOLERANCES, assert_near, poisoned_memory
from .padding import assert_laid_out, holes, in_float64, poisoned

fused = pytest.importorskip("primal_attention.ops.causal_primal.triton", exc_type=ImportError)

B, N, H, P, C = 2, 37, 1, 5, 7
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


def inputs(device, dtype=torch.float32, *, length=N, dims=(P, C)):
    """q, k, a_e, a_r, bias and the sums before the first token."""
    p, c = dims
    q, k = randn(B, length, H, 2 * p).to(device, dtype).split(p, -1)
    a_e, a_r = randn(2, H, p, c, seed=1).to(device, torch.float32)
    before = randn(2, B, H, p, seed=3).to(device, torch.float32)
    return [q, k, a_e, a_r, randn(c, seed=2).to(device, torch.float32), *before]


def assert_both_passes(tensors, mask=None, maps=("cosine", "cosine"), *, grams=True, totals=True):
    q, k = tensors[:2]
    counts = token_counts(q, mask, torch.tensor([3.0, 0.0], device=q.device))
    a = tensors[2] if tensors[2] is not None else tensors[3]
    d_out = randn(*q.shape[:3], a.shape[-1], seed=4).to(q)
    small = {"device": q.device, "dtype": torch.float32}
    d_grams = list(randn(2, B, H, *q.shape[-1:] * 2, seed=5).to(**small)) if grams else [None] * 2
    d_totals = list(randn(2, B, H, q.shape[-1], seed=6).to(**small)) if totals else [None] * 2
    bad, exact = [poisoned(q, mask), poisoned(k, mask), *tensors[2:]], in_float64(*tensors)
    options = counts, mask, *maps
    *got, q_sums, k_sums = fused.forward(*bad, *options, grams)
    *want, nothing, _ = composed.forward_of_two_ops(*exact, *options, grams)
    assert_near(got, want, TOLERANCES[q.dtype])
    d_small = d_grams + d_totals
    assert_near(
        fused.backward(*bad, *options, q_sums, k_sums, poisoned(d_out, mask), *d_small),
        composed.backward_of_two_ops(
            *exact, *options, nothing, nothing, *in_float64(d_out, *d_small)
        ),
        TOLERANCES[q.dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("masked", [True, False])
def test_outputs_grams_totals_and_gradients(device, dtype, masked):
    assert_both_passes(inputs(device, dtype), holes(B, N, device) if masked else None)


@pytest.mark.parametrize("maps", [("elu", "relu"), ("relu", "identity"), ("identity", "elu")])
def test_every_map(device, maps):
    assert_both_passes(inputs(device), holes(B, N, device), maps)


@pytest.mark.parametrize("missing", [(2, 4), (3, 5, 6)], ids=["e and bias", "r and state"])
def test_without_some_input(device, missing):
    tensors = inputs(device)
    for number in missing:
        tensors[number] = None
    assert_both_passes(tensors, grams=False, totals=False)


@pytest.mark.parametrize(("length", "dims"), [(1, (1, 1)), (16, (16, 16)), (17, (37, 3))])
def test_any_size(device, length, dims):
    assert_both_passes(inputs(device, length=length, dims=dims), maps=("elu", "elu"))


@pytest.mark.parametrize("programs", [1, 100])
def test_any_number_of_segments(device, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    assert_both_passes(inputs(device))


def test_columns_need_not_be_adjacent(device):
    q, k, *rest = inputs(device)
    assert_both_passes([q.mT.contiguous().mT, k.mT.contiguous().mT, *rest])


@pytest.mark.parametrize("grams", [True, False])
def test_the_layout_is_the_one_that_is_announced(device, grams, monkeypatch):
    monkeypatch.setattr(composed, "is_fused", lambda *tensors: True)
    monkeypatch.setattr(composed, "FORWARD", fused.FORWARD)
    q, k, a_e, *rest = inputs(device, torch.bfloat16)
    q, a_e = q.mT.contiguous().mT, a_e.mT.contiguous().mT
    given = q, k, a_e, *rest, token_counts(q, None, None), None, "cosine", "elu"
    outputs = fused.forward(*given, grams)
    assert_laid_out(outputs, composed._empty_outputs(*given, grams))
    d_outputs = [x if x.numel() else None for x in outputs[:5]]
    gradients = fused.backward(*given, *outputs[5:], *d_outputs)
    assert_laid_out(gradients, composed._empty_gradients(*given))


def test_both_passes_walk_over_the_same_blocks(device):
    for key, config in sizes.FORWARD.items():
        assert sizes.BACKWARD[key].block == config.block


def test_in_two_parts_it_is_the_same(device):
    q, k, *weights, q_before, k_before = inputs(device)
    count = torch.tensor([3.0, 0.0], device=device)
    options = None, "cosine", "cosine", False

    def run(part, count, *before):
        counts = token_counts(q[:, part], None, count)
        return fused.forward(q[:, part], k[:, part], *weights, *before, counts, *options)

    whole = run(slice(0, N), count, q_before, k_before)
    first = run(slice(0, 21), count, q_before, k_before)
    second = run(slice(21, N), count + 21, *first[3:5])
    got = torch.cat([first[0], second[0]], 1), *second[3:5]
    assert_near(got, in_float64(whole[0], *whole[3:5]), 1e-6)
