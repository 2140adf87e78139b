"""The fused KSVD objective builds for a Hopper GPU, and what it keeps fits its registers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .fused import Build, assert_fits

CASES = ["given:64", "own:64", "own:256", "trace:26"]


@pytest.mark.slow
def test_they_fit_a_hopper_gpu():
    result = subprocess.run(
        [sys.executable, Path(__file__).parent / "hopper_ksvd.py", *CASES],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    builds = [Build(case, name, *map(int, numbers)) for case, name, *numbers in rows]
    assert {build.case for build in builds} == set(CASES)
    for build in builds:
        assert_fits(build)
