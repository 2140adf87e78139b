"""The fused passes of the projected op build for a Hopper GPU, and what they keep fits it."""

import pytest

from .fused import assert_fits, built_for_hopper

#   With the bytes of a thread that may go to memory.
CASES = {
    "static:64:bfloat16": 0,
    "sampled:64:bfloat16": 0,
    "static:64:float16": 0,
    "sampled:32:float32": 64,
}
NAMES = {
    "static": {"collapse_blocks"},
    "sampled": {"weight_blocks", "row_blocks", "parameter_blocks"},
}
SHARED = {"forward_blocks", "backward_blocks", "total_blocks", "add_up_blocks", "row_sum_blocks"}


@pytest.mark.slow
def test_they_build_and_only_float32_spills():
    builds = built_for_hopper("hopper_projected.py", *CASES)
    for case, spilled in CASES.items():
        mine = [build for build in builds if build.case == case]
        assert {build.name for build in mine} == NAMES[case.split(":")[0]] | SHARED
        for build in mine:
            assert_fits(build, spilled=spilled)
