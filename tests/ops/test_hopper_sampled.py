"""The fused ops of the sampled weights build for a Hopper GPU, and what they keep fits it."""

import pytest

from .fused import assert_fits, built_for_hopper

CASES = ["64:bfloat16", "64:float32"]


@pytest.mark.slow
def test_they_build_without_spilling():
    builds = built_for_hopper("hopper_sampled.py", *CASES)
    assert len({build.name for build in builds}) == 6, "an op was not launched"
    for build in builds:  # total_blocks is the quickest with all of its registers taken
        assert_fits(build, spilled=16 if build.name == "total_blocks" else 0)
