"""Count the Python calls and files of a training step: its host time, and how much to read."""

import sys
import threading
from pathlib import Path

import pytest
import torch

import primal_attention
from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.op import fused_ops

PACKAGE = str(Path(primal_attention.__file__).parent)


def calls_of_a_step(**options):
    """File and name of each call that the second training step makes."""
    layer = PrimalAttention(dim=64, num_heads=4, num_directions=8, **options)
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
    return calls


def test_a_training_step_makes_few_calls_in_few_files():
    calls = calls_of_a_step()
    assert len(calls) <= 60, calls
    assert len({file for file, _ in calls}) <= 10


# What the interpreter does for a loop over tokens.
@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
def test_a_fused_training_step_crosses_few_files():
    """Causal dual weights, with the code that a GPU would run."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("compiles for the GPU")
    with fused_ops("always"):
        files = {file for file, _ in calls_of_a_step(weights="dual", causal=True)}
    assert any(file.endswith("causal/fused_dual.py") for file in files)
    assert len(files) <= 12, sorted(files)
