"""The convolution along the tokens against torch's, and its matrix."""

import pytest
import torch
import torch.nn.functional as F

from primal_attention.attention.baselines.nystrom import band, convolve

from ..dense import assert_close, randn

H, C = 3, 5


def as_convolution(x, taps):
    """Each head is a channel, the head dim a width that the filter does not see."""
    padding = (taps.shape[1] // 2, 0)
    out = F.conv2d(x.transpose(1, 2), taps[:, None, :, None], padding=padding, groups=len(taps))
    return out.transpose(1, 2)


def with_gradients(function, x, taps, cotangent):
    x, taps = x.clone().requires_grad_(), taps.clone().requires_grad_()
    y = function(x, taps)
    return y, *torch.autograd.grad(y, [x, taps], cotangent)


def test_band():
    want = [[[1, 2, 3, 0, 0], [0, 1, 2, 3, 0], [0, 0, 1, 2, 3]]]
    assert band(torch.tensor([[1, 2, 3]]), 3).tolist() == want


@pytest.mark.parametrize("num_tokens", [1, 2, 93, 94, 95, 301])
@pytest.mark.parametrize("num_taps", [1, 3, 35, 129])
def test_against_torch(num_taps, num_tokens):
    """With 35 taps a block has 94 tokens."""
    x, cotangent = (randn(2, num_tokens, H, C, seed=seed) for seed in (1, 2))
    arguments = x, randn(H, num_taps), cotangent
    got, want = (with_gradients(f, *arguments) for f in (convolve, as_convolution))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 7e-4)])
def test_half_precision(dtype, bound):
    exact = randn(4, 301, H, C), randn(H, 35, seed=1), randn(4, 301, H, C, seed=2)
    want = with_gradients(as_convolution, *exact)
    got = with_gradients(convolve, *(z.to(dtype) for z in exact))
    for one, other in zip(got, want, strict=True):
        assert one.dtype is dtype
        assert (one.double() - other).norm() <= bound * other.norm()


def test_one_graph_for_any_length():
    compiled = torch.compile(convolve, backend="aot_eager", fullgraph=True, dynamic=True)
    taps = randn(H, 35)
    for num_tokens in (47, 101, 300):
        x = randn(2, num_tokens, H, C)
        got, want = (with_gradients(f, x, taps, x) for f in (compiled, as_convolution))
        for one, other in zip(got, want, strict=True):
            assert_close(one, other)
