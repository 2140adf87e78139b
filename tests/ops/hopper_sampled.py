"""Compiles what the ops of the sampled weights would launch on a Hopper GPU, without one.

A program of its own, since the tests run Triton's interpreter.
"""

import sys
from collections.abc import Callable

import torch
from hopper import DTYPES, compiled


def launches(width: int, dtype: torch.dtype, *, directions: int = 32) -> Callable[[], None]:
    from primal_attention.ops.landmarks.triton import landmark_index
    from primal_attention.ops.sampled import triton as fused

    B, N, H, M, S = 2, 1024, 2, 320, directions
    x, mask = torch.zeros(B, N, H * width, dtype=dtype), torch.ones(B, N, dtype=torch.bool)
    index, moves = torch.zeros(B, M, dtype=torch.long), torch.zeros(B, M)
    w, c = torch.zeros(H, M, S), torch.zeros(width, 2 * S)
    c_e, c_r = (part.mT for part in c.chunk(2, 1))
    weights, a = torch.zeros(B, H, width, S), torch.zeros(B, H, width, width)

    def launch() -> None:
        landmark_index(x, mask, moves, moves, M, 0.5, 0.1)
        inputs = x, index, w, w, c_e, c_r, 1.0
        fused.forward(*inputs)
        fused.backward(*inputs, weights, weights, weights, weights, a, a)

    return launch


if __name__ == "__main__":
    for case in sys.argv[1:]:
        width, dtype, *directions = case.split(":")
        options = {"directions": int(directions[0])} if directions else {}
        for usage in compiled(launches(int(width), DTYPES[dtype], **options)):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
