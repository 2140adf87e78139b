import pytest
import torch

from primal_attention.ops import launch
from primal_attention.ops.running_mean import chunked, token_counts

from .formulas import randn
from .fused import DEVICES, TOLERANCES, assert_near, poisoned_memory
from .padding import assert_laid_out, holes, in_float64, poisoned

fused = pytest.importorskip("primal_attention.ops.running_mean.triton", exc_type=ImportError)

B, N, H, C = 2, 37, 2, 5
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
    small = {width: launch.Config(16, 4, 1) for width in fused.CONFIGS}
    monkeypatch.setattr(fused, "CONFIGS", small)


def assert_both_passes(z, before=None, count=None, mask=None):
    counts = token_counts(z, mask, count)
    d_mean = randn(*z.shape, seed=2).to(z)
    d_total = randn(z.shape[0], *z.shape[2:], seed=3).to(z.device, torch.float32)
    assert_near(
        fused.forward(poisoned(z, mask), before, counts, mask),
        chunked.forward_in_pieces(*in_float64(z, before), counts, mask),
        TOLERANCES[z.dtype],
    )
    assert_near(
        fused.backward(d_mean, d_total, counts, mask),
        chunked.backward_in_pieces(*in_float64(d_mean, d_total), counts, mask),
        TOLERANCES[z.dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("masked", [False, True])
def test_means_and_gradients(device, dtype, masked):
    z = randn(B, N, H, 2 * C).to(device, dtype)[..., 3 : 3 + C]
    count = torch.tensor([3.0, 0.0], device=device)
    before = randn(B, H, C, seed=1).to(device, torch.float32)
    assert_both_passes(z, before, count, holes(B, N, device) if masked else None)


@pytest.mark.parametrize(("length", "heads", "width"), [(1, 1, 1), (16, 2, 16), (37, 1, 65)])
def test_any_size(device, length, heads, width):
    assert_both_passes(randn(B, length, heads, width).to(device, torch.float32))


@pytest.mark.parametrize("programs", [1, 100])
def test_any_number_of_segments(device, programs, monkeypatch):
    monkeypatch.setattr(launch, "PROGRAMS", programs)
    z = randn(1, 331, 1, 5)  # 21 blocks: more segments than are added up at once
    assert_both_passes(z.to(device, torch.float32))


def test_columns_need_not_be_adjacent(device):
    assert_both_passes(randn(B, C, H, N).to(device, torch.float32).transpose(1, 3))


def test_the_layout_is_the_one_that_is_announced(device):
    z = randn(B, C, H, N).to(device, torch.bfloat16).transpose(1, 3)
    counts = token_counts(z, None, None)
    assert_laid_out(fused.forward(z, None, counts, None), chunked._empty_outputs(z))


def test_what_it_takes(device):
    assert fused.takes(torch.zeros(1, 2, 3, 256, dtype=torch.bfloat16, device=device))
    assert not fused.takes(torch.zeros(1, 2, 3, 257, device=device))
    assert not fused.takes(torch.zeros(1, 2, 3, 4, dtype=torch.float64, device=device))
    assert not fused.takes(torch.zeros(1, 0, 3, 4, device=device))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_blocks(device, dtype, masked):
    """Of 48 tokens all are, in two segments."""
    z = randn(B, 48, H, C).to(device, dtype)
    before = randn(B, H, C, seed=1).to(device, torch.float32)
    assert_both_passes(z, before, mask=holes(B, 48, device) if masked else None)


@pytest.mark.parametrize("length", [N, 48])
def test_masked_tokens_have_no_gradient_even_of_an_infinite_carry(device, length):
    mask = holes(B, length, device)
    d_mean = randn(B, length, H, C, seed=2).to(device, torch.bfloat16)
    d_total = torch.full((B, H, C), float("inf"), device=device)
    dz, _ = fused.backward(d_mean, d_total, token_counts(d_mean, mask, None), mask)
    assert (dz[~mask] == 0).all()


def test_which_blocks_are_whole(device):
    assert launch.Segments(tokens=32, number=2).whole(48, block=16)
    assert not launch.Segments(tokens=32, number=2).whole(47, block=16)
    assert not launch.Segments(tokens=24, number=2).whole(48, block=16)


@pytest.mark.parametrize("masked", [False, True])
def test_sequences_of_one_segment_have_blocks_of_their_own(device, masked, monkeypatch):
    monkeypatch.setattr(fused, "ENOUGH", B * H)
    monkeypatch.setattr(fused, "MANY", B * H)
    z = randn(B, 67, H, 64).to(device, torch.bfloat16)
    assert fused.config_of(z) == fused.ONE_SEGMENT[64]
    assert fused.config_of(z.float()) == fused.config_of(z[:1]) == fused.CONFIGS[64]
    assert_both_passes(z, mask=holes(B, 67, device) if masked else None)


def assert_gradients_with_sum(given, mask, *, divided, known=None):
    counts = fused.counts_if_masked(given, mask)
    t = token_counts(given, mask, None).clamp(min=1)[:, :, None, None].double()
    exact = given.double() * t if divided else given.double()
    dz, _ = chunked.backward_in_pieces(exact, None, t[:, :, 0, 0], mask)
    got = fused.backward_with_sum(given, counts, mask, divided=divided, known=known)
    assert_near(got, [dz, dz.sum((0, 1))], TOLERANCES[given.dtype])


def d_means(device, dtype, length, mask):
    d_mean = randn(B, length, H, C, seed=2).to(device, dtype)
    return d_mean if mask is None else d_mean.where(mask[:, :, None, None], 0.0)


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("dtype", "masked"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("length", [N, 48])
def test_gradients_with_their_sum(device, length, dtype, masked, divided):
    """The same whether the gradients of the means come as they are or divided by t."""
    mask = holes(B, length, device) if masked else None
    d_mean = d_means(device, dtype, length, mask)
    if divided:
        t = token_counts(d_mean, mask, None).clamp(min=1)[:, :, None, None]
        d_mean = (d_mean / t).to(dtype)
    assert_gradients_with_sum(d_mean, mask, divided=divided)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("length", "tokens"), [(48, 24), (48, 16), (N, 24)])
def test_known_segments_need_not_be_of_the_same_blocks(device, length, tokens, masked):
    mask = holes(B, length, device) if masked else None
    given = d_means(device, torch.float32, length, mask)
    sums = torch.stack([part.sum(1) for part in given.split(tokens, 1)], 1)
    known = launch.Segments(tokens, sums.shape[1]), sums
    assert_gradients_with_sum(given, mask, divided=True, known=known)
