"""The fused ops build for a Hopper GPU, and what they keep fits its registers."""

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
    "few:64:bfloat16": 64,
    "static:64:float16": 0,
    "dual:64:float16": 0,
    "sampled:32:float32": 64,
    "dual:32:float32": 64,
    "dual_causal:64:float32": 256,
    "causal_part:64:bfloat16": 32,
    "scan-cosine:64:bfloat16": 64,
    "scan-elu:64:bfloat16": 64,
    "scan-unit_elu:64:bfloat16": 32,
    "scan-unit_elu-both:64:bfloat16": 64,
    "j_given:64:float32": 0,
    "j_own:64:float32": 0,
    "j_own:256:float32": 0,
    "landmark_index:64:bfloat16": 0,
}
STATIC = {"collapse_blocks", "forward_blocks", "backward_blocks", "total_blocks"}
MEANS = {"add_segments", "walk_along"}
WALKS = {"segment_sums", "forward_walk", "backward_walk"}
SCAN = {"segment_states", "join_segments", "read_blocks", "gradient_blocks"}
NAMES = {
    "static": {*STATIC, "row_sum_blocks"},
    "sampled": {
        "weight_blocks",
        "forward_blocks",
        "total_blocks",
        "backward_blocks",
        "row_blocks",
        "parameter_blocks",
        "row_sum_blocks",
    },
    "causal": {*STATIC, *MEANS, "row_sum_blocks"},
    "causal_part": {*STATIC, *MEANS, "row_sum_blocks"},
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
    "dual_causal": {*WALKS, "running_sums", "segment_gradients", "row_sum_blocks"},
    "few": {*WALKS, "row_sum_blocks"},
    "scan-cosine": SCAN,
    "scan-elu": SCAN,
    "scan-unit_elu": {*SCAN, "step_gradients"},
    "scan-unit_elu-both": {*SCAN, "step_gradients"},
    "j_given": {"energy_blocks", "mean_block", "gradient_blocks"},
    "j_own": {"energy_blocks", "mean_block", "gradient_blocks"},
    "landmark_index": {"index_blocks"},
}
FULL = {"total_blocks": 16}  # the quickest with all of its registers taken


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_they_build_and_hardly_spill():
    builds = built_for_hopper("hopper.py", *CASES)
    for case, spilled in CASES.items():
        mine = [build for build in builds if build.case == case]
        assert {build.name for build in mine} - {"add_up_blocks"} == NAMES[case.split(":")[0]], case
        for build in mine:
            assert_fits(build, spilled=max(spilled, FULL.get(build.name, 0)))
