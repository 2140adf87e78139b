"""Compiles what the projected op would launch on a Hopper GPU, without one.

A program of its own, since the tests run Triton's interpreter.
"""

import sys
from collections.abc import Callable

import torch
from hopper import DTYPES, compiled


def launches(kind: str, width: int, dtype: torch.dtype) -> Callable[[], None]:
    from primal_attention.ops.column_sum.triton import column_sum
    from primal_attention.ops.projected import triton as fused
    from primal_attention.ops.projected.composed import _empty_outputs

    B, N, H, S, M = 2, 256, 2, 32, 320
    D, rows = H * width, M if kind == "sampled" else width
    x, weight, shift = (torch.zeros(*s, dtype=dtype) for s in ((B, N, D), (2 * D, D), (2 * D,)))
    w, bias = torch.zeros(H, rows, S), torch.zeros(width)
    c_e, c_r = (part.mT for part in torch.zeros(width, 2 * S).chunk(2, 1))
    index = torch.zeros(B, M, dtype=torch.long) if kind == "sampled" else None
    mask = torch.ones(B, N, dtype=torch.bool)
    given = x, weight, shift, w, w, c_e, c_r, bias, index, 1.0, mask, "cosine", "cosine"

    def launch() -> None:
        fused.forward(*given, True, True)
        out, gram_q, gram_k, e, r, *kept = _empty_outputs(*given, True, True)
        fused.backward(*given, e, r, *kept, out, gram_q, gram_k, e, r, True, True)
        column_sum(x.flatten(0, 1))

    return launch


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, width, dtype = case.split(":")
        for usage in compiled(launches(kind, int(width), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
