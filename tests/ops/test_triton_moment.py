import pytest
import torch

from primal_attention.ops.moment.chunked import backward_in_pieces, forward_in_pieces

from .formulas import MAPS, randn, token_masks
from .fused import (
    DEVICES,
    TOLERANCES,
    assert_bits,
    assert_fits,
    assert_near,
    built_for_hopper,
    in_double,
    poisoned_memory,
)

fused = pytest.importorskip("primal_attention.ops.moment.triton", exc_type=ImportError)
from primal_attention.ops.triton_launch import Config  # noqa: E402 - needs triton

B, N, H, P, S = 2, 23, 2, 5, 7
MASKS = token_masks(B, N)
SPLIT = Config(block=16, tile=16, num_warps=4, num_stages=2, programs=1 << 20, least=1)
__all__ = ["poisoned_memory"]
pytestmark = [
    # What the interpreter does for a loop over tokens.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def inputs(device, dtype=torch.float32, *, width=P, columns=S, length=N):
    z = 2 * randn(B, length, H, width).to(dtype)
    values = randn(B, length, H, columns, seed=1).to(dtype)
    return z.to(device), values.to(device), randn(B, H, width, columns, seed=2).float().to(device)


def check(z, values, d_moment, mask=None, feature_map="cosine"):
    """Values and both gradients against float64."""
    arguments = z, values, None if mask is None else mask.to(z.device), feature_map
    tolerance = TOLERANCES[z.dtype]
    expected = in_double(lambda *x: [forward_in_pieces(*x)], arguments)
    assert_near([fused.forward(*arguments)], expected, tolerance, "value")
    gradients = fused.backward(*arguments, d_moment)
    expected = in_double(backward_in_pieces, (*arguments, d_moment))
    assert_near(gradients, expected, tolerance, "gradient")


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [
        ("none", torch.bfloat16),
        ("padded", torch.float16),
        ("holes", torch.float32),
        ("empty", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("feature_map", MAPS)
def test_values_and_gradients(device, feature_map, mask, dtype):
    check(*inputs(device, dtype), MASKS[mask], feature_map)


@pytest.mark.parametrize(
    ("width", "columns", "dtype"),
    [
        (64, 32, torch.bfloat16),
        (16, 100, torch.float32),
        (130, 40, torch.float16),
        (256, 5, torch.bfloat16),
    ],
)
def test_sizes(device, width, columns, dtype):
    check(*inputs(device, dtype, width=width, columns=columns), MASKS["holes"])


@pytest.mark.parametrize("length", [1, 16, 17, 49])
@pytest.mark.parametrize("shape", [(B, H, P, S), (H, P, S)])
def test_shares_of_the_tokens_and_sums_over_the_batch(device, length, shape):
    z, values, _ = inputs(device, length=length)
    total = torch.full(shape, float("nan"), device=device)
    fused.add_moments(z, values, None, "cosine", total, SPLIT)
    expected = forward_in_pieces(z.double(), values.double(), None, "cosine")
    assert_near([total], [expected if len(shape) == 4 else expected.sum(0)], 1e-6)


def by_n(device):
    """1 / n of two sequences."""
    return torch.tensor([1 / 3, 1 / 11], device=device)


def test_means(device):
    z, values, _ = inputs(device)
    total = torch.full((B, H, P, S), float("nan"), device=device)
    fused.add_moments(z, values, None, "cosine", total, SPLIT, inverse_n=by_n(device))
    expected = forward_in_pieces(z.double(), values.double(), None, "cosine")
    assert_near([total], [expected * by_n(device).double()[:, None, None, None]], 1e-6)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_means_that_are_added_to_others(device, dtype, adjacent):
    z, values, d_moment = inputs(device, dtype)
    mask = MASKS["empty"].to(device)
    others = torch.where(mask[..., None, None], randn(B, N, H, P, seed=5).to(z), 0.0)
    dz = others.clone() if adjacent else others.mT.contiguous().mT
    d_values = torch.empty_like(values)
    options = mask, "elu"
    fused.pull_back(
        z, values, d_moment, None, *options, dz, d_values, inverse_n=by_n(device), add=True
    )
    d_mean = d_moment.double() * by_n(device).double()[:, None, None, None]
    expected, expected_values = backward_in_pieces(z.double(), values.double(), *options, d_mean)
    assert_near([dz, d_values], [expected + others.double(), expected_values], TOLERANCES[dtype])
    assert not dz[~mask].any()


@pytest.mark.parametrize("feature_map", MAPS)
def test_what_stands_at_masked_tokens_reaches_nothing(device, feature_map):
    z, values, d_moment = inputs(device)
    mask = MASKS["empty"].to(device)
    bad = [torch.where(mask[..., None, None], x, float("nan")) for x in (z, values)]
    options = mask, feature_map
    assert_bits([fused.forward(*bad, *options)], [fused.forward(z, values, *options)])
    gradients = fused.backward(*bad, *options, d_moment)
    assert_bits(gradients, fused.backward(z, values, *options, d_moment))
    for gradient in gradients:
        assert not gradient[~mask].any()


def test_views(device):
    z, values, d_moment = inputs(device)
    check(
        z.transpose(1, 3).contiguous().transpose(1, 3),
        torch.stack([values, values], 2).unbind(2)[1],
        d_moment.mT.contiguous().mT,
        MASKS["holes"],
    )


def test_what_the_fused_op_does_not_take(device):
    z, values, _ = inputs(device)
    assert fused.takes(z, values)
    assert not fused.takes(z.double(), values.double())
    assert not fused.takes(z, values.half())
    assert not fused.takes(z[:, :0], values[:, :0])
    assert not fused.takes(z, values[..., :1].expand(B, N, H, 257))


@pytest.mark.slow
def test_they_fit_a_hopper_gpu():
    cases = ["moment:64:bfloat16:0", "moment:128:bfloat16:1"]
    for build in built_for_hopper("hopper_primal.py", *cases):
        assert_fits(build)
