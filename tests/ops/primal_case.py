"""Calls of the fused op `primal`, and what they are held against."""

import pytest
import torch

from primal_attention.ops.primal.chunked import backward_in_pieces, forward_in_pieces

from .formulas import randn
from .fused import DEVICES, TOLERANCES, assert_near, in_double

fused = pytest.importorskip("primal_attention.ops.primal.triton", exc_type=ImportError)
from primal_attention.ops.triton_launch import Config  # noqa: E402 - needs triton

B, N, H, P, C = 2, 23, 2, 5, 7
SPLIT = Config(block=16, tile=16, num_warps=4, num_stages=2, programs=1 << 20, least=1)
MARKS = [
    # What the interpreter does for a loop over tokens.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


class Case:
    """Inputs and cotangents of one call."""

    def __init__(self, device, dtype=torch.float32, **options):
        batch, length, width, columns = (options.get(name, default) for name, default in
            (("batch", B), ("length", N), ("width", P), ("columns", C)))  # fmt: skip
        self.mask = options.get("mask")
        lead = {"batched": (batch, H), "shared": (H,)}
        kind_e, kind_r = options.get("kinds", ("batched", "shared"))
        tokens = (batch, length, H)
        self.maps = options.get("maps", ("cosine", "cosine"))
        self.grams = options.get("grams", (True, True))
        self.tensors = {
            "q": 2 * randn(*tokens, width).to(dtype),
            "k": 2 * randn(*tokens, width, seed=1).to(dtype),
            "a_e": randn(*lead[kind_e], width, columns, seed=2).float(),
            "a_r": randn(*lead[kind_r], width, columns, seed=3).float(),
            "bias": randn(columns, seed=4).to(dtype),
        }
        self.cotangents = {
            "d_out": randn(*tokens, columns, seed=5).to(dtype),
            "d_gram_q": randn(batch, H, width, width, seed=6).float(),
            "d_gram_k": randn(batch, H, width, width, seed=7).float(),
        }
        for group in (self.tensors, self.cotangents):
            for name, tensor in group.items():
                group[name] = None if name in options.get("without", ()) else tensor.to(device)
        if self.mask is not None:
            self.mask = self.mask.to(device)

    def forward(self):
        return *self.tensors.values(), self.mask, *self.maps, *self.grams

    def backward(self):
        return *self.tensors.values(), self.mask, *self.maps, *self.cotangents.values()


def check(case, dtype=torch.float32, *, config=None, tolerance=None):
    """Values and all gradients against float64."""
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    values = fused.forward(*case.forward(), config)
    assert_near(values, in_double(forward_in_pieces, case.forward()), tolerance, "value")
    gradients = fused.backward(*case.backward(), config)
    assert_near(gradients, in_double(backward_in_pieces, case.backward()), tolerance, "gradient")
