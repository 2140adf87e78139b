"""The fused KSVD objective builds for a Hopper GPU, and what it keeps fits its registers."""

import pytest

from .fused import assert_fits, built_for_hopper

CASES = ["given:64", "own:64", "own:256", "trace:26"]


@pytest.mark.slow
def test_they_fit_a_hopper_gpu():
    for build in built_for_hopper("hopper_ksvd.py", *CASES):
        assert_fits(build)
