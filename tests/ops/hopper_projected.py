"""Compiles what the ops that begin with the tokens would launch on a Hopper GPU, without one.

A program of its own, since the tests run Triton's interpreter.
"""

import sys
from collections.abc import Callable

import torch
from hopper import DTYPES, compiled

B, N, H, S, M = 2, 256, 2, 32, 320


def launches(kind: str, width: int, dtype: torch.dtype) -> Callable[[], None]:
    if kind == "dual":
        from primal_attention.ops.projected_dual import triton as fused
        from primal_attention.ops.projected_dual.composed import _empty_outputs
    else:
        from primal_attention.ops.projected import triton as fused
        from primal_attention.ops.projected.composed import _empty_outputs

    given = dual(width, dtype) if kind == "dual" else with_parameters(kind, width, dtype)

    def launch() -> None:
        fused.forward(*given, True, True)
        out, gram_q, gram_k, e, r, *kept = _empty_outputs(*given, True, True)
        fused.backward(*given, e, r, *kept, out, gram_q, gram_k, e, r, True, True, True)

    return launch


def projection(width: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = (B, N, H * width), (rows, H * width), (rows,)
    return [torch.zeros(*shape, dtype=dtype) for shape in shapes]


def score_maps(width: int) -> list[torch.Tensor]:
    c_e, c_r = torch.zeros(width, 2 * S).chunk(2, 1)
    return [c_e.mT, c_r.mT, torch.zeros(width)]


def with_parameters(kind: str, width: int, dtype: torch.dtype) -> tuple:
    w = torch.zeros(H, M if kind == "sampled" else width, S)
    index = torch.zeros(B, M, dtype=torch.long) if kind == "sampled" else None
    options = index, 1.0, kind == "causal", torch.ones(B, N, dtype=torch.bool), "cosine", "cosine"
    return *projection(width, 2 * H * width, dtype), w, w, *score_maps(width), *options


def dual(width: int, dtype: torch.dtype) -> tuple:
    options = H, torch.ones(B, N, dtype=torch.bool), "cosine", "cosine"
    return *projection(width, 2 * H * (width + S), dtype), *score_maps(width), *options


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, width, dtype = case.split(":")
        for usage in compiled(launches(kind, int(width), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
