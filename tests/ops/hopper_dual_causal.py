"""Compiles what the causal op with dual weights would launch on a Hopper GPU, without one.

A program of its own, since the tests run Triton's interpreter.
"""

import sys
from collections.abc import Callable

import torch
from hopper import DTYPES, compiled


def launches(width: int, directions: int, dtype: torch.dtype) -> Callable[[], None]:
    from primal_attention.ops.dual_causal import triton as fused
    from primal_attention.ops.running_mean import token_counts

    B, N, H, S = 1, 2048, 2, directions
    z, h = torch.zeros(B, N, H, width, dtype=dtype), torch.zeros(B, N, 2, H, S, dtype=dtype)
    c_e, c_r = (part.mT for part in torch.zeros(width, 2 * S).chunk(2, 1))
    side, gram = torch.zeros(B, H, width, S), torch.zeros(B, H, width, width)
    maps = c_e, c_r, torch.zeros(width)
    counts = token_counts(z, None, torch.zeros(B))
    after_others = *maps, side, side, counts
    alone = *(c.to(dtype) for c in maps), None, None, None

    def launch() -> None:
        for given in (after_others, alone):
            inputs = z, z, h, *given, None, "cosine", "cosine"
            *_, states = fused.forward(*inputs, True, True)
            fused.backward(*inputs, states, z, side, side, gram, gram)
        few = z[:, :64], z[:, :64], h[:, :64]  # in one segment: Gram matrices alone come first
        fused.forward(*few, *alone, None, "cosine", "cosine", True, True)

    return launch


if __name__ == "__main__":
    for case in sys.argv[1:]:
        width, directions, dtype = case.split(":")
        for usage in compiled(launches(int(width), int(directions), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
