"""Compiles what a fused op would launch on a Hopper GPU, without one: registers and spilled bytes.

A program of its own, since the tests run Triton's interpreter.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from sass import products_astray
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Name, registers, bytes of stack, products that read anywhere, loads by descriptors, bytes of
# shared memory.
Usage = tuple[str, int, int, int, int, int]
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class _Hopper:
    """As much of a driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Callable[[], Any]) -> list[Usage]:
    """What the fused ops take that a function launches; nothing is run."""
    driver.set_active(_Hopper())
    found: list[Usage] = []
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: Any, **options: Any) -> None:
        kernel = run(self, *args, **{**options, "warmup": True})
        usage = _usage(kernel.asm["cubin"], "wgmma.mma_async" in kernel.asm["ptx"])
        found.append((self.fn.__name__, *usage, kernel.metadata.shared))

    JITFunction.run = only_compile
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


@cache
def _usage(cubin: bytes, has_products: bool) -> tuple[int, int, int, int]:
    text = _dumped(cubin, "cuobjdump", "--dump-resource-usage")
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    code = _dumped(cubin, "nvdisasm", "-c") if has_products else ""
    astray = products_astray(code) if has_products else 0
    return int(registers), int(stack), astray, code.count("UTMALDG")


def _dumped(cubin: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def tokens(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def running_mean(C: int, dtype: torch.dtype) -> Callable[[], Any]:
    from primal_attention.ops.running_mean import token_counts
    from primal_attention.ops.running_mean import triton as fused

    def launch() -> None:
        for length in (2048, 2039):  # in whole blocks alone, and not
            z, carry = tokens(1, length, 2, C, dtype=dtype), torch.zeros(1, 2, C)
            counts = token_counts(z, None, None)
            fused.forward(z, None, counts, None)
            fused.backward(z, carry, counts, None)
            fused.forward(z, None, None, None)
            fused.backward_with_sum(z, None, None, divided=True)

    return launch


def scan(C: int, dtype: torch.dtype) -> Callable[[], Any]:
    from primal_attention.ops.scan import triton as fused

    z, h = tokens(1, 2048, 2, C, dtype=dtype), tokens(1, 2048, 2, C // 2, dtype=dtype)
    d_out, d_state = tokens(1, 2048, 2, C, dtype=torch.float32), torch.zeros(1, 2, C, C)
    mapped = z, z, h, torch.zeros(C // 2, C), None, None, "cosine", "cosine"
    plain = z, z, z, None, None, None, "elu", "elu"

    def launch() -> None:
        for inputs in (mapped, plain):
            fused.forward(*inputs)
            fused.backward(*inputs, d_out, d_state)

    return launch


OPS = {"running_mean": running_mean, "scan": scan}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

if __name__ == "__main__":
    for case in sys.argv[1:]:
        op, width, dtype = case.split(":")
        for usage in compiled(OPS[op](int(width), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
