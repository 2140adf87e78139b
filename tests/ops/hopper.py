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


H, S, M = 2, 32, 320
# Sequences and tokens: so many sequences that one program has all of a sequence and head; so many
# tokens that a sequence is several segments.
SIZES = {
    "short": (264, 256),
    "causal": (2, 1024),
    "causal_part": (2, 1015),
    "dual_causal": (2, 1024),
    "few": (1, 64),
}


def layer(kind: str, width: int, dtype: torch.dtype) -> Any:
    """Inputs of a layer."""
    from primal_attention.ops.layer.eager import LayerInputs

    dual = kind in ("dual", "short", "dual_causal", "few")
    (batch, length), dim = SIZES.get(kind, (2, 256)), H * width
    w = None if dual else torch.zeros(H, M if kind == "sampled" else width, S)
    weight, bias = torch.zeros(dim, dim), torch.zeros(dim)
    mask = (
        None
        if kind in ("causal_part", "dual_causal")
        else torch.ones(batch, length, dtype=torch.bool)
    )
    return LayerInputs(
        torch.zeros(batch, length, dim, dtype=dtype),
        q_weight=weight,
        k_weight=weight,
        h_weight=torch.zeros(2 * H * S, dim) if dual else None,
        q_bias=bias,
        k_bias=bias,
        h_bias=torch.zeros(2 * H * S) if dual else None,
        w_e=w,
        w_r=w,
        score_weight=torch.zeros(width, 2 * S),
        score_bias=torch.zeros(width),
        out_weight=weight,
        out_bias=bias,
        raw_lambda=torch.zeros(H, S),
        positions=torch.zeros(batch, M, dtype=torch.long) if kind == "sampled" else None,
        scale=1.0,
        num_heads=H,
        causal=kind in ("causal", "causal_part", "dual_causal", "few"),
        token_mask=mask,
        scores="both",
        map_q="cosine",
        map_k="cosine",
        grams=True,
    )


def scan(kind: str, width: int, dtype: torch.dtype) -> Any:
    """Inputs of a scan: one side without time, or two sides with a learned one."""
    from primal_attention.ops.causal.eager import ScanInputs

    _, name, *both = kind.split("-")
    z, timed = torch.zeros(2, 1, 2048, H, width, dtype=dtype), name == "unit_elu"
    sides, columns = (2, S) if timed else (1, width + 1)  # values and a column of ones
    return ScanInputs(
        z,
        torch.zeros(1, 2048, sides, H, columns, dtype=dtype),
        None if both else torch.zeros(1, H, sides, width, columns),
        torch.zeros(1, 2048, H) if timed else None,
        torch.ones(1, 2048, dtype=torch.bool) if timed else None,
        name,
        name,
        bool(both),
    )


def objective(kind: str, width: int, dtype: torch.dtype) -> Any:
    """Inputs of J: with a trace, or that of the weights."""
    from primal_attention.ops.objective.eager import MeanJInputs

    gram, own, count = torch.zeros(1, H, width, width), kind == "j_own", torch.zeros(1)
    w = torch.zeros(H, width, 30) if own else torch.zeros(1, H, width, 30)
    trace = None if own else torch.zeros(H)
    diagonal = torch.zeros(H, 30)
    return MeanJInputs(
        gram, gram, w, w, trace, diagonal, count, count, True, True, True, dtype != torch.float32
    )


def landmark_index(kind: str, width: int, dtype: torch.dtype) -> Any:
    """Inputs of the positions of landmarks."""
    from primal_attention.ops.landmarks.eager import IndexInputs

    x, moves = torch.zeros(2, 1024, width, dtype=dtype), torch.zeros(2, M)
    return IndexInputs(x, torch.ones(2, 1024, dtype=torch.bool), moves, moves, M, 0.5, 0.1)


OPS = {
    **dict.fromkeys(("static", "sampled", "causal", "causal_part", "dual", "short"), "layer"),
    **dict.fromkeys(("dual_causal", "few"), "layer"),  # few: Gram matrices alone come first
    **dict.fromkeys(("scan-cosine", "scan-elu", "scan-unit_elu", "scan-unit_elu-both"), "scan"),
    **dict.fromkeys(("j_given", "j_own"), "mean_j"),
    "landmark_index": "landmark_index",
}
INPUTS = {
    "layer": layer,
    "scan": scan,
    "mean_j": objective,
    "landmark_index": landmark_index,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def launches(kind: str, width: int, dtype: torch.dtype) -> Callable[[], None]:
    """Both passes of an op."""
    from primal_attention.ops.op import Backward
    from primal_attention.ops.triton.backend import OPS as FUSED

    op = FUSED[OPS[kind]]
    given = INPUTS[op.name](kind, width, dtype)
    assert op.supports(given)

    def launch() -> None:
        op.forward(given, keep=True)
        if op.differentiable:
            outputs = op.empty(given)
            names = op.differentiable
            wanted = frozenset(name for name in names if getattr(given, name) is not None)
            kept = outputs[op.first_kept :]
            grads = [each if each.numel() else None for each in outputs[: op.num_outputs]]
            op.backward(given, Backward(kept, grads, wanted, spent=True))

    return launch


if __name__ == "__main__":
    for case in sys.argv[1:]:
        kind, width, dtype = case.split(":")
        for usage in compiled(launches(kind, int(width), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
