"""Fused outputs, Gram matrices and moments against the same in plain PyTorch."""

import pytest
import torch

from primal_attention.ops.primal import Attended, collapsed_attention, moment

from .formulas import randn, token_masks
from .fused import DEVICES, MAPS, TOLERANCES, assert_same_as_eager, poisoned_memory

B, N, H, P, C, S = 2, 23, 2, 5, 7, 6
MASKS = token_masks(B, N)
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


def tensors(device, dtype=torch.float32, *, kinds=("batched", "shared"), **options):
    """Queries, keys, A_e, A_r and the bias."""
    sizes = {"B": B, "N": N, "P": P, "C": C} | options
    batch, length, width, columns = (sizes[name] for name in "BNPC")
    lead = {"batched": (batch, H), "shared": (H,)}
    rows = (2 * randn(batch, length, 2, H, width).to(dtype)).unbind(2)
    a_e, a_r = (
        randn(*lead[kind], width, columns, seed=2 + i).float() for i, kind in enumerate(kinds)
    )
    return [each.to(device) for each in (*rows, a_e, a_r, randn(columns, seed=4).to(dtype))]


def check(given, mask=None, maps=("cosine", "cosine"), *, skipped=()):
    def run(*x):
        options = {"token_mask": mask, "map_q": maps[0], "map_k": maps[1]}
        return collapsed_attention(Attended(*x, **options))

    assert_same_as_eager(run, given, TOLERANCES[given[0].dtype], skipped=skipped)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("kinds", [("batched", "shared"), ("shared", "shared")])
@pytest.mark.parametrize("mask", ["none", "empty"])
def test_values_and_gradients(device, dtype, kinds, mask):
    mask = None if mask == "none" else MASKS[mask].to(device)
    check(tensors(device, dtype, kinds=kinds), mask)


@pytest.mark.parametrize("skipped", [(0,), (1, 2)])
def test_gradients_of_some_outputs(device, skipped):
    check(tensors(device), MASKS["holes"].to(device), skipped=skipped)


@pytest.mark.parametrize("other", ["cosine", "elu"])
@pytest.mark.parametrize("one", MAPS)
def test_maps(device, one, other):
    check(tensors(device), MASKS["holes"].to(device), (one, other))


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({"N": 1, "P": 1, "C": 1}, torch.float32),
        ({"N": 65, "P": 64, "C": 64}, torch.bfloat16),
        ({"N": 64, "P": 16, "C": 16}, torch.bfloat16),  # whole blocks, by descriptors
        ({"P": 70, "C": 33}, torch.float16),  # the passes go side by side
        ({"P": 130, "C": 5, "N": 17}, torch.float32),
    ],
    ids=str,
)
def test_sizes(device, sizes, dtype):
    maps = ("identity", "identity") if sizes["P"] == 1 else ("cosine", "cosine")
    check(tensors(device, dtype, **sizes), maps=maps)


def test_several_sequences_for_a_program(device, monkeypatch):
    primal = pytest.importorskip("primal_attention.ops.primal.fused")
    small = primal.BACKWARD[torch.float32][16]._replace(block=16, programs=4)
    monkeypatch.setitem(primal.BACKWARD[torch.float32], 16, small)
    given = tensors(device, B=7, N=17, kinds=("shared", "shared"))
    check(given, token_masks(7, 17)["empty"].to(device))


def test_several_shares_of_a_sequence(device, monkeypatch):
    primal = pytest.importorskip("primal_attention.ops.primal.fused")
    for table in (primal.FORWARD, primal.BACKWARD):
        small = table[torch.float32][16]._replace(block=16, programs=1 << 20, least=1)
        monkeypatch.setitem(table[torch.float32], 16, small)
    check(tensors(device, N=67))


def moments(device, dtype=torch.float32, **options):
    """Tokens and values of both sides, [2, H, B, N, .]."""
    sizes = {"N": N, "P": P, "S": S} | options
    z = 2 * randn(2, H, B, sizes["N"], sizes["P"]).to(dtype)
    return [z.to(device), randn(2, H, B, sizes["N"], sizes["S"], seed=1).to(dtype).to(device)]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize(
    ("sizes", "maps"),
    [
        ({}, ("cosine", "elu")),
        ({"P": 70, "S": 65, "N": 17}, ("cosine", "cosine")),
        ({"N": 1, "S": 1}, ("relu", "identity")),
    ],
)
def test_moments(device, dtype, sizes, maps):
    given = moments(device, dtype, **sizes)
    mask = token_masks(B, given[0].shape[-2])["empty" if sizes == {} else "none"]
    mask = None if mask is None else mask[:, :, None].to(device)
    tolerance = TOLERANCES[dtype]
    assert_same_as_eager(lambda *x: [moment(*x, maps, mask)], given, tolerance)
    one = [x[0] for x in given]
    assert_same_as_eager(lambda *x: [moment(*x, maps[:1], mask)], one, tolerance)


def test_moments_of_several_shares(device, monkeypatch):
    fused_moment = pytest.importorskip("primal_attention.ops.primal.fused_moment")
    small = fused_moment.CONFIGS[torch.float32][16]._replace(block=16, programs=1 << 20, least=1)
    monkeypatch.setitem(fused_moment.CONFIGS[torch.float32], 16, small)
    given = moments(device, N=67)
    assert_same_as_eager(lambda *x: [moment(*x, ("cosine", "elu"), None)], given, 1e-6)
