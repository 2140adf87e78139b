"""The fused passes of the projected op build for a Hopper GPU, and what they keep fits it.

As a program, this file compiles what they would launch there: the tests run the interpreter.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

CASES = ["static:64:bfloat16", "sampled:64:bfloat16", "static:64:float16", "sampled:32:float32"]
NAMES = {
    "static": {"collapse_blocks"},
    "sampled": {"weight_blocks", "row_blocks", "parameter_blocks"},
}
SHARED = {"forward_blocks", "backward_blocks", "total_blocks", "add_up_blocks", "row_sum_blocks"}


@pytest.mark.slow
def test_they_build_without_spilling():
    triton = pytest.importorskip("triton")
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip("needs ptxas and cuobjdump")
    result = subprocess.run(
        [sys.executable, __file__, *CASES],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    for case in CASES:
        kind = case.split(":")[0]
        assert {name for found, name, *_ in rows if found == case} == NAMES[kind] | SHARED
    for case, name, _registers, stack, shared in rows:
        assert int(stack) == 0 or "float32" in case, f"{case} {name} spills {stack} bytes"
        assert int(shared) <= 227 * 1024, f"{case} {name} takes {shared} bytes of shared memory"


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
    from hopper import DTYPES, compiled

    for case in sys.argv[1:]:
        kind, width, dtype = case.split(":")
        for usage in compiled(launches(kind, int(width), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
