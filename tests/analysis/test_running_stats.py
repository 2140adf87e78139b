"""Mean and deviation do not depend on the portions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.analysis.running_stats import MeanDeviation, RunningStats


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=5))
def test_portions_and_lengths_make_no_difference(portions):
    generator = torch.Generator().manual_seed(len(portions))
    rows = [torch.randn(*each, generator=generator, dtype=torch.float64) for each in portions]
    longest = max(each.shape[1] for each in rows)
    running = RunningStats(fill=1.0)
    for each in rows:
        running.add(each)
    whole = torch.cat(
        [torch.nn.functional.pad(each, (0, longest - each.shape[1]), value=1.0) for each in rows]
    )
    assert running.count == len(whole)
    torch.testing.assert_close(running.mean, whole.mean(0))
    torch.testing.assert_close(running.deviation, whole.std(0, correction=0))


def test_a_deviation_far_from_zero_keeps_its_digits():
    running = RunningStats()
    for value in (1e9, 1e9 + 1, 1e9 + 2):
        running.add(torch.tensor([[value]], dtype=torch.float64))
    assert abs(running.columns()[0].deviation - (2 / 3) ** 0.5) < 1e-9


def test_a_spread_as_text():
    assert str(MeanDeviation(1.5, 0.25)) == "1.5 ± 0.25"
    assert str(MeanDeviation(float("nan"), float("nan"))) == "-"
