"""The fused causal ops build for a Hopper GPU, and what they keep fits its registers."""

import pytest

from .fused import assert_fits, built_for_hopper

#   With the bytes of a thread that may go to memory.
CASES = {"running_mean:64:bfloat16": 32, "scan:64:bfloat16": 64}


@pytest.mark.slow
def test_they_hardly_spill():
    for build in built_for_hopper("hopper.py", *CASES):
        assert_fits(build, spilled=CASES[build.case])
