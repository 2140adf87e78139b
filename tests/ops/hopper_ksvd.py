"""Compiles what the fused KSVD objective would launch on a Hopper GPU, without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from hopper import compiled

H, S = 2, 30


def objective(width: int, *, own_trace: bool) -> Callable[[], Any]:
    from primal_attention.ops.ksvd import triton as fused

    gram = torch.zeros(1, H, width, width)
    w = torch.zeros(H, width, S) if own_trace else torch.zeros(1, H, width, S)
    trace, counts = None if own_trace else torch.zeros(H), torch.zeros(1)
    inputs = gram, gram, w, w, torch.zeros(H, S), trace, counts, counts

    def launch() -> None:
        mean, *kept = fused.forward(*inputs, True, True, True)
        fused.backward(*inputs, *kept, True, True, mean)

    return launch


def trace(rows: int) -> Callable[[], Any]:
    from primal_attention.ops.ksvd import triton_trace as fused

    w = torch.zeros(H, rows, S)

    def launch() -> None:
        fused.backward(w, w, fused.forward(w, w))

    return launch


OPS = {
    "given": lambda width: objective(width, own_trace=False),
    "own": lambda width: objective(width, own_trace=True),
    "trace": trace,
}

if __name__ == "__main__":
    for case in sys.argv[1:]:
        op, width = case.split(":")
        for usage in compiled(OPS[op](int(width))):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
