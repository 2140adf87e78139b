"""Intervals over seeds against SciPy and against simulation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from primal_attention.training.results import average, estimate, t_quantile


@given(st.floats(1.0, 1e4), st.floats(0.5, 0.99))
def test_the_quantile_is_that_of_student(freedom, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert t_quantile(freedom, confidence) == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=7))
def test_the_interval_is_that_of_student(values):
    found = estimate(values)
    scale = stats.sem(values)
    expected = scale * stats.t.ppf(0.975, len(values) - 1)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.margin == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found.seeds == len(values)


def test_one_seed_has_no_interval():
    assert estimate([57.0]).margin is None
    assert str(estimate([57.04])) == "57.0 (1)"
    assert average([estimate([57.0]), estimate([1.0, 3.0])]).margin is None


def test_an_average_covers_what_it_should():
    """Means of three sets with 3, 4 and 5 seeds: the interval holds the truth 95 times in 100."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        runs = [generator.normal(0, scale, n) for scale, n in ((1, 3), (2, 4), (0.5, 5))]
        found = average([estimate(each.tolist()) for each in runs])
        assert found.mean == pytest.approx(np.mean([each.mean() for each in runs]))
        covered += abs(found.mean) <= found.margin
    assert 0.92 <= covered / 400 <= 0.98


def test_an_average_of_one_is_itself():
    alone = estimate([1.0, 2.0, 4.0])
    assert average([alone]).margin == pytest.approx(alone.margin)
    assert average([estimate([2.0, 2.0]), estimate([4.0, 4.0])]).margin == 0
