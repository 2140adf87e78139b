"""Fused running means and scans against the same in plain PyTorch."""

import pytest
import torch

from primal_attention.ops.causal import running_mean, scan, token_counts

from .formulas import randn, token_masks
from .fused import DEVICES, TOLERANCES, assert_same_as_eager, poisoned_memory

B, N, H, C, V = 2, 43, 2, 5, 7
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
    mask = token_masks(B, length)[name]
    return None if mask is None else mask[:, :, None].to(device)


def means(mask, before_counts, device, length=N):
    """Running means of z and of a sum before it."""
    x = torch.zeros(B, length, 1, device=device)
    counts = token_counts(x, None if mask is None else mask[:, :, 0], before_counts)[:, :, None]
    return lambda z, total: running_mean(z, mask, counts, total)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("mask", ["none", "holes", "empty"])
@pytest.mark.parametrize("skipped", [(), (0,), (1,)])
def test_running_means(device, dtype, mask, skipped):
    z = randn(2, H, B, N, C).to(dtype).to(device)
    total = randn(2, H, B, 1, C, seed=1).float().to(device)
    seen = torch.tensor([3, 0], device=device)
    run = means(mask_of(mask, N, device), seen, device)
    assert_same_as_eager(run, [z, total], TOLERANCES[dtype], skipped=skipped)


@pytest.mark.parametrize(("length", "width"), [(1, 1), (64, 16), (65, 17), (300, 67)])
def test_running_means_of_any_size_from_the_first_token_on(device, length, width):
    z = randn(H, B, length, width).float().to(device)
    run = means(None, None, device, length)
    assert_same_as_eager(lambda z: run(z, None), [z], 1e-6)


def tensors(device, dtype=torch.float32, *, length=N, width=C, columns=V):
    """Near, far, values and the state."""
    return [
        2 * randn(H, B, length, width).to(dtype).to(device),
        2 * randn(H, B, length, width, seed=1).to(dtype).to(device),
        randn(H, B, length, columns, seed=2).to(dtype).to(device),
        randn(H, B, width, columns, seed=3).float().to(device),
    ]


def check_scan(given, maps=("cosine", "cosine"), mask=None, tolerance=1e-6, **options):
    def run(near, far, values, state):
        z = torch.stack((near, far))
        return scan(z, values[None], maps, mask, state[None])[:2]

    assert_same_as_eager(run, given, tolerance, **options)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("mask", ["none", "empty"])
def test_scans(device, dtype, mask):
    given = tensors(device, dtype)
    check_scan(given, mask=mask_of(mask, N, device), tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("maps", [("elu", "relu"), ("relu", "identity"), ("identity", "elu")])
def test_maps_of_scans(device, maps):
    check_scan(tensors(device), maps, mask_of("holes", N, device))


@pytest.mark.parametrize("sizes", [(1, 2, 1), (64, 16, 16), (17, 67, 3), (19, 5, 65)])
def test_scans_of_any_size(device, sizes):
    length, width, columns = sizes
    check_scan(tensors(device, length=length, width=width, columns=columns))


@pytest.mark.parametrize("skipped", [(0,), (1,)])
@pytest.mark.parametrize("programs", [1, 100])
def test_scans_in_any_number_of_segments(device, programs, skipped, monkeypatch):
    monkeypatch.setattr("primal_attention.ops.triton.launch.PROGRAMS", programs)
    monkeypatch.setattr("primal_attention.ops.triton.launch.SHORTEST", 1)
    check_scan(tensors(device, length=101), skipped=skipped)
    z = randn(H, B, 201, C).float().to(device)
    assert_same_as_eager(lambda z: means(None, None, device, 201)(z, None), [z], 1e-6)


@pytest.mark.parametrize("mask", ["none", "empty"])
def test_both_sides_read_each_other(device, mask):
    mask = mask_of(mask, 19, device)
    z, h = (
        randn(2, H, B, 19, C).float().to(device),
        randn(2, H, B, 19, V, seed=1).float().to(device),
    )
    state = randn(2, H, B, C, V, seed=2).float().to(device)

    def run(z, h, state):
        return scan(z, h, ("cosine", "elu"), mask, state, grams=True)

    assert_same_as_eager(run, [z, h, state], 1e-6)
