"""FLOPs of the ops, as torch.utils.flop_counter has them: products of matrices, times two."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from primal_attention import build_attention

B, N, D, H, C, S = 2, 100, 16, 2, 8, 32
PROJECTION = 2 * B * N * D * D


def counted(layer, device):
    """FLOPs of the forward pass and of the backward pass."""
    x = torch.randn(B, N, D, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_linear_attention(device):
    layer = build_attention("linear", D, H).to(device)
    moments = 2 * 2 * B * H * N * C * (C + 1)
    forward, backward = counted(layer, device)
    assert forward == 4 * PROJECTION + moments
    assert backward == 2 * forward


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_primal_attention_with_dual_weights(device):
    layer = build_attention("primal", D, H, weights="dual", num_directions=S).eval().to(device)
    rows = 2 * B * N * D * (2 * D + 2 * H * S)
    weights = scores = mapped = 2 * 2 * B * H * N * C * S
    forward, backward = counted(layer, device)
    assert forward == rows + weights + scores + mapped + PROJECTION
    assert backward == 2 * forward
