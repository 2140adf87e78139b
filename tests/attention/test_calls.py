"""Count the Python calls of a training step, which cost host time."""

import sys
import threading
from pathlib import Path

import torch

import primal_attention
from primal_attention import PrimalAttention, ksvd_loss

PACKAGE = str(Path(primal_attention.__file__).parent)


def test_a_training_step_makes_few_calls_in_few_files():
    layer = PrimalAttention(dim=64, num_heads=4, num_directions=8)
    x, mask = torch.randn(2, 100, 64), torch.arange(100) < torch.tensor([[100], [73]])
    calls = []

    def step():
        y = layer(x, token_mask=mask)
        (y.square().mean() + 0.1 * ksvd_loss(layer)).backward()

    def listen(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename, frame.f_code.co_qualname))

    step()
    threading.setprofile(listen)  # of the threads of the backward pass
    sys.setprofile(listen)
    try:
        step()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(calls) <= 60, calls
    assert len({file for file, _ in calls}) <= 10
