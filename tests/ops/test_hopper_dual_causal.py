"""The fused causal op with dual weights builds for a Hopper GPU, and what it keeps fits it."""

import pytest

from .fused import assert_fits, built_for_hopper

#   With the bytes of a thread that may go to memory.
CASES = {"64:32:bfloat16": 64, "64:32:float32": 256}


@pytest.mark.slow
def test_it_builds_and_hardly_spills():
    builds = built_for_hopper("hopper_dual_causal.py", *CASES)
    walks = {"forward_walk", "backward_walk"}
    names = walks | {"segment_sums", "segment_gradients", "running_sums", "add_up_blocks"}
    assert {build.name for build in builds} == names
    for build in builds:
        assert_fits(build, spilled=CASES[build.case])
