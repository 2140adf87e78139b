"""Compiles what the ops that begin with the tokens would launch on a Hopper GPU, without one.

A program of its own, since the tests run Triton's interpreter.
"""

import sys
from collections.abc import Callable

import torch
from hopper import DTYPES, compiled

H, S, M = 2, 32, 320
SEQUENCES = {"short": 264}  # so many that one program has all of a sequence and head; else 2
# So many that a sequence is several segments; else 256.
TOKENS = {"causal": 1024, "dual_causal": 1024}
DUAL = ("dual", "short", "dual_causal")


def launches(kind: str, width: int, dtype: torch.dtype) -> Callable[[], None]:
    if kind == "dual_causal":
        from primal_attention.ops.projected_dual_causal import triton as fused
        from primal_attention.ops.projected_dual_causal.composed import _empty_outputs
    elif kind in DUAL:
        from primal_attention.ops.projected_dual import triton as fused
        from primal_attention.ops.projected_dual.composed import _empty_outputs
    else:
        from primal_attention.ops.projected import triton as fused
        from primal_attention.ops.projected.composed import _empty_outputs

    given = (dual if kind in DUAL else with_parameters)(kind, width, dtype)
    spent = () if kind == "dual_causal" else (True,)

    def launch() -> None:
        fused.forward(*given, True, True)
        out, gram_q, gram_k, e, r, *kept = _empty_outputs(*given, True, True)
        fused.backward(*given, e, r, *kept, out, gram_q, gram_k, e, r, True, True, *spent)

    return launch


def projection(kind: str, width: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = (*_sizes(kind), H * width), (rows, H * width), (rows,)
    return [torch.zeros(*shape, dtype=dtype) for shape in shapes]


def score_maps(width: int) -> list[torch.Tensor]:
    c_e, c_r = torch.zeros(width, 2 * S).chunk(2, 1)
    return [c_e.mT, c_r.mT, torch.zeros(width)]


def mask(kind: str) -> torch.Tensor | None:
    return None if kind == "dual_causal" else torch.ones(*_sizes(kind), dtype=torch.bool)


def _sizes(kind: str) -> tuple[int, int]:
    return SEQUENCES.get(kind, 2), TOKENS.get(kind, 256)


def with_parameters(kind: str, width: int, dtype: torch.dtype) -> tuple:
    w = torch.zeros(H, M if kind == "sampled" else width, S)
    index = torch.zeros(2, M, dtype=torch.long) if kind == "sampled" else None
    options = index, 1.0, kind == "causal", mask(kind), "cosine", "cosine"
    return *projection(kind, width, 2 * H * width, dtype), w, w, *score_maps(width), *options


def dual(kind: str, width: int, dtype: torch.dtype) -> tuple:
    options = H, mask(kind), "cosine", "cosine"
    return *projection(kind, width, 2 * H * (width + S), dtype), *score_maps(width), *options


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, width, dtype = case.split(":")
        for usage in compiled(launches(kind, int(width), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
