"""SOFT against the paper: the Gaussian kernel, all pairs of it and through landmarks.

No other implementation is installed; the published one runs on CUDA only and learns its landmarks.
"""

import math

import pytest
import torch

from primal_attention.attention.baselines.soft import SoftAttention, newton_inverse
from primal_attention.testing import check_attention

from ..dense import MASKS, B, C, D, H, N, assert_close, assert_same_with_gradients, randn
from .sequences import by_sequence, largest_tensor

M = 5  # landmarks


def build(**options):
    torch.manual_seed(0)
    return SoftAttention(D, H, **({"num_landmarks": M} | options)).double().eval()


def kernel(a, b):
    return torch.stack(
        [torch.stack([(-(x - y).square().sum() / (2 * math.sqrt(C))).exp() for y in b]) for x in a]
    )


def published(q, k, v, head, *, num_landmarks=M):
    """The kernel of all pairs, or its Nystrom form with the exact inverse."""
    n = len(q)
    if n <= num_landmarks:
        return kernel(q, q) @ v
    members = [[] for _ in range(num_landmarks)]
    for i in range(n):
        members[i * num_landmarks // n].append(i)
    landmarks = torch.stack([sum(q[i] for i in some) / len(some) for some in members])
    p = kernel(landmarks, q)
    return p.T @ torch.linalg.inv(kernel(landmarks, landmarks)) @ p @ v


@pytest.mark.parametrize("mask", MASKS)
def test_through_landmarks(mask):
    """Tokens far enough apart for the iteration to converge; one sequence has fewer than M."""
    layer = build()
    x = (4 * randn(B, N, D)).requires_grad_()
    token_mask = MASKS[mask]
    if mask == "holes":
        token_mask = token_mask.clone()
        token_mask[0, 6:] = False
        assert 1 < token_mask[0].sum() < M < token_mask[1].sum()
    got = layer(x, token_mask=token_mask)
    want = by_sequence(layer, published, x, token_mask)
    assert_same_with_gradients(layer, got, want, [x])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("num_landmarks", [N, N + 4])
def test_few_tokens_have_the_exact_kernel(num_landmarks, mask):
    layer = build(num_landmarks=num_landmarks)
    x = randn(B, N, D).requires_grad_()
    got = layer(x, token_mask=MASKS[mask])
    want = by_sequence(
        layer, lambda q, k, v, head: published(q, k, v, head, num_landmarks=N), x, MASKS[mask]
    )
    assert_same_with_gradients(layer, got, want, [x])


def test_exactness_does_not_depend_on_the_padding():
    layer = build(num_landmarks=N)
    x = randn(B, N, D)
    longer = torch.cat([randn(B, 9, D, seed=1), x, randn(B, 9, D, seed=2)], dim=1)
    mask = torch.zeros(B, N + 18, dtype=torch.bool)
    mask[:, 9:-9] = True
    assert_close(layer(longer, token_mask=mask)[:, 9:-9], layer(x))


def test_the_iteration_inverts():
    points = 3 * randn(6, C)
    matrix = kernel(points, points)
    assert_close(newton_inverse(matrix, 20) @ matrix, torch.eye(6, dtype=torch.float64))


def test_the_iteration_gives_the_pseudo_inverse_of_equal_tokens():
    """The published start, twice ours, goes to 0 here."""
    ones = torch.ones(M, M, dtype=torch.float64)
    assert_close(newton_inverse(ones, 20), torch.linalg.pinv(ones))
    zeros = torch.zeros(M, M, dtype=torch.float64)
    assert_close(newton_inverse(zeros, 20), zeros)


def test_its_gradient_is_that_of_the_inverse():
    points = 3 * randn(6, C)
    matrix = kernel(points, points).requires_grad_()
    cotangent = randn(6, 6, seed=1)
    (got,) = torch.autograd.grad(newton_inverse(matrix, 20), matrix, cotangent)
    (want,) = torch.autograd.grad(torch.linalg.inv(matrix), matrix, cotangent)
    assert_close(got, want)


def test_contract_with_fewer_landmarks_than_tokens():
    """The gradient is that of the inverse itself, so the iteration has to come near to it."""
    check_attention(lambda: SoftAttention(12, 2, num_landmarks=4, num_iterations=20))


def test_second_derivatives_are_those_of_the_inverse():
    matrix = torch.eye(M, dtype=torch.float64) + 0.2 * randn(M, M).square()
    matrix = (matrix + matrix.mT).requires_grad_()
    for order in (1, 2):
        made = []
        for inverse in (newton_inverse(matrix, 40), torch.linalg.inv(matrix)):
            derivative = inverse
            for seed in range(order):
                weighted = (derivative * randn(M, M, seed=seed)).sum()
                (derivative,) = torch.autograd.grad(weighted, matrix, create_graph=True)
            made.append(derivative)
        assert_close(*made, 1e-9)


def test_long_sequences_stay_finite_in_float32():
    """Means of long segments are nearly equal, and their kernel matrix is nearly singular."""
    torch.manual_seed(0)
    layer = SoftAttention(D, H)
    x = randn(1, 4096, D, dtype=torch.float32).requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    double = layer.double()(x.detach().double())
    assert (out - double).norm() < 1e-3 * double.norm()


def test_the_largest_tensor_grows_linearly():
    layer = SoftAttention(12, 2, num_landmarks=8)
    assert largest_tensor(layer, 512) <= 4 * largest_tensor(layer, 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "SoftAttention has no causal form"),
        ({"num_landmarks": 0}, "num_landmarks must be a positive integer, got 0"),
        ({"num_iterations": 0}, "num_iterations must be a positive integer, got 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SoftAttention(D, H, **options)


def test_queries_are_keys():
    layer = build()
    names = {name.split(".")[0] for name in layer.state_dict()}
    assert names == {"q_proj", "v_proj", "out_proj"}
    with pytest.raises(ValueError, match="SoftAttention has no cross-attention"):
        layer(randn(B, N, D), randn(B, N, D))
