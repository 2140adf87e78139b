"""The fused passes of the ops that begin with the tokens build for a Hopper GPU, and fit it."""

import pytest

from .fused import assert_fits, built_for_hopper

#   With the bytes of a thread that may go to memory.
CASES = {
    "static:64:bfloat16": 0,
    "sampled:64:bfloat16": 0,
    "causal:64:bfloat16": 16,  # of the masked walk, whose registers are capped
    "dual:64:bfloat16": 0,
    "short:64:bfloat16": 0,
    "dual_causal:64:bfloat16": 64,
    "static:64:float16": 0,
    "dual:64:float16": 0,
    "sampled:32:float32": 64,
    "dual:32:float32": 64,
}
NAMES = {
    "static": {
        "collapse_blocks",
        "forward_blocks",
        "backward_blocks",
        "row_sum_blocks",
        "total_blocks",
    },
    "sampled": {
        "weight_blocks",
        "forward_blocks",
        "total_blocks",
        "backward_blocks",
        "row_blocks",
        "parameter_blocks",
        "row_sum_blocks",
    },
    "causal": {
        "collapse_blocks",
        "add_up",
        "forward_blocks",
        "backward_blocks",
        "walk_along",
        "total_blocks",
    },
    "dual": {
        "collapse_blocks",
        "moment_blocks",
        "forward_blocks",
        "sum_blocks",
        "total_blocks",
        "row_gradient_blocks",
        "row_sum_blocks",
    },
    "short": {"whole_blocks", "whole_gradient_blocks", "row_sum_blocks"},
    "dual_causal": {
        "segment_sums",
        "running_sums",
        "forward_walk",
        "segment_gradients",
        "backward_walk",
    },
}
FULL = {"total_blocks": 16}  # the quickest with all of its registers taken
SHARED = {"add_up_blocks"}


@pytest.mark.slow
def test_they_build_and_hardly_spill():
    builds = built_for_hopper("hopper_projected.py", *CASES)
    for case, spilled in CASES.items():
        mine = [build for build in builds if build.case == case]
        assert {build.name for build in mine} == NAMES[case.split(":")[0]] | SHARED
        for build in mine:
            assert_fits(build, spilled=max(spilled, FULL.get(build.name, 0)))
