"""The fused causal op with dual weights builds for a Hopper GPU, and what it keeps fits it.

As a program, this file compiles what it would launch there: the tests run the interpreter.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# With the bytes of a thread that may go to memory.
CASES = {"64:32:bfloat16": 64, "64:32:float32": 256}


@pytest.mark.slow
def test_it_builds_and_hardly_spills():
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
    assert {row[1] for row in rows} == {"segment_moments", "forward_walk", "backward_walk"}
    for case, name, _registers, stack, shared in rows:
        assert int(stack) <= CASES[case], f"{case} {name} spills {stack} bytes"
        assert int(shared) <= 227 * 1024, f"{case} {name} takes {shared} bytes of shared memory"


def launches(width: int, directions: int, dtype: torch.dtype) -> Callable[[], None]:
    from primal_attention.ops.dual_causal import triton as fused
    from primal_attention.ops.running_mean import token_counts

    B, N, H, S = 1, 2048, 2, directions
    z, h = torch.zeros(B, N, H, width, dtype=dtype), torch.zeros(B, N, 2, H, S, dtype=dtype)
    c_e, c_r = (part.mT for part in torch.zeros(width, 2 * S).chunk(2, 1))
    side, gram = torch.zeros(B, H, width, S), torch.zeros(B, H, width, width)
    counts = token_counts(z, None, torch.zeros(B))
    inputs = z, z, h, c_e, c_r, torch.zeros(width), side, side, counts, None, "cosine", "cosine"

    def launch() -> None:
        *_, states = fused.forward(*inputs, True, True)
        fused.backward(*inputs, states, z, side, side, gram, gram)

    return launch


if __name__ == "__main__":
    from hopper import DTYPES, compiled

    for case in sys.argv[1:]:
        width, directions, dtype = case.split(":")
        for usage in compiled(launches(int(width), int(directions), DTYPES[dtype])):
            sys.stdout.write(" ".join(map(str, (case, *usage))) + "\n")
