"""Compiles what the fused primal and moment ops would launch on a Hopper GPU, without one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from hopper import DTYPES, compiled


def primal(width: int, dtype: torch.dtype, mask: torch.Tensor | None) -> Callable[[], Any]:
    from primal_attention.ops.primal import triton as fused

    z = torch.zeros(1, 2048, 2, width, dtype=dtype)
    a, bias, gram = (
        torch.zeros(2, width, width),
        torch.zeros(width),
        torch.zeros(1, 2, width, width),
    )
    shared = z, z, a, a, bias, mask, "cosine", "cosine"

    def launch() -> None:
        fused.forward(*shared, True, True)
        fused.backward(*shared, z, gram, gram)

    return launch


def runs(width: int, dtype: torch.dtype, mask: torch.Tensor | None) -> Callable[[], Any]:
    """The backward pass of many sequences, in whole blocks and not."""
    from primal_attention.ops.primal import triton as fused

    B, H = 512, 2
    matrices = torch.zeros(H, width, width), torch.zeros(B, H, width, width)

    def launch() -> None:
        for length in (128, 127):
            z = torch.zeros(B, length, H, width, dtype=dtype)
            real = None if mask is None else mask[:, :length].expand(B, length)
            a, gram = matrices
            for d_gram in (gram, None):
                inputs = z, z, a, a, torch.zeros(width), real, "cosine", "cosine"
                fused.backward(*inputs, z, d_gram, d_gram)

    return launch


def moment(width: int, dtype: torch.dtype, mask: torch.Tensor | None) -> Callable[[], Any]:
    from primal_attention.ops.moment import triton as fused

    z = torch.zeros(1, 2048, 2, width, dtype=dtype)
    values = torch.zeros(1, 2048, 2, 32, dtype=dtype)

    def launch() -> None:
        fused.forward(z, values, mask, "cosine")
        fused.backward(z, values, mask, "cosine", torch.zeros(1, 2, width, 32))

    return launch


OPS = {"primal": primal, "runs": runs, "moment": moment}

if __name__ == "__main__":
    for case in sys.argv[1:]:
        op, width, dtype, masked = case.split(":")
        mask = torch.ones(1, 2048, dtype=torch.bool) if masked == "1" else None
        for usage in compiled(OPS[op](int(width), DTYPES[dtype], mask)):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
