"""The fused causal ops build for a Hopper GPU, and what they keep fits its registers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
CASES = [
    "running_mean:64:bfloat16",
    "causal_primal:64:bfloat16",
    "causal_primal:64:float32",
    "scan:64:bfloat16",
]
SPILLED = 64  # bytes of a thread that may go to memory


@pytest.mark.slow
@pytest.mark.skipif(not (TOOLS / "ptxas").exists(), reason="needs ptxas")
@pytest.mark.skipif(shutil.which(TOOLS / "cuobjdump") is None, reason="needs cuobjdump")
def test_they_build_without_spilling():
    program = Path(__file__).parent / "hopper.py"
    result = subprocess.run(
        [sys.executable, program, *CASES],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    assert {row[0] for row in rows} == set(CASES)
    for case, name, _registers, stack, shared in rows:
        assert int(stack) <= SPILLED, f"{case} {name} spills {stack} bytes"
        assert int(shared) <= 227 * 1024, f"{case} {name} takes {shared} bytes of shared memory"
