"""The fused ops of the sampled weights build for a Hopper GPU, and what they keep fits it.

As a program, this file compiles what they would launch there: the tests run the interpreter.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

CASES = ["64:bfloat16", "64:float32"]


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
    assert {row[0] for row in rows} == set(CASES)
    assert len({row[1] for row in rows}) == 6, "an op was not launched"
    for case, name, _registers, stack, shared in rows:
        assert int(stack) == 0, f"{case} {name} spills {stack} bytes"
        assert int(shared) <= 227 * 1024, f"{case} {name} takes {shared} bytes of shared memory"


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
    from hopper import DTYPES, compiled

    for case in sys.argv[1:]:
        width, dtype, *directions = case.split(":")
        options = {"directions": int(directions[0])} if directions else {}
        for usage in compiled(launches(int(width), DTYPES[dtype], **options)):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
