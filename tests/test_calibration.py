"""Measures of calibration against their definitions, and the temperature against a search."""

import pytest
import torch
import torch.nn.functional as F

from primal_attention.calibration import calibration, fit_temperature


def cases(n: int = 400, k: int = 5, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, k, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return scale * logits, labels


def test_measures_by_hand():
    probabilities = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]])
    labels = torch.tensor([0, 1, 1, 1])
    found = calibration(probabilities, labels, num_bins=2)
    assert found.accuracy == 0.75
    assert found.ece == pytest.approx(abs(0.75 - (0.9 + 0.8 + 0.7 + 0.6) / 4))
    nll = -torch.tensor([0.9, 0.2, 0.7, 0.6]).log().mean().item()
    assert found.nll == pytest.approx(nll)
    assert found.brier == pytest.approx((0.02 + 1.28 + 0.18 + 0.32) / 4)
    assert found.aurc == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_ece_sums_over_bins():
    probabilities = torch.tensor([[0.95, 0.05], [0.55, 0.45]])
    found = calibration(probabilities, torch.tensor([1, 0]), num_bins=10)
    assert found.ece == pytest.approx((0.95 + 0.45) / 2)
    certain = calibration(torch.eye(3), torch.arange(3))
    assert certain == (1.0, 0.0, 0.0, 0.0, 0.0)


def test_temperature_minimises_the_loss():
    logits, labels = cases()
    temperature = fit_temperature(logits, labels)
    assert 2.5 < temperature < 3.6  # the labels were drawn at 3

    def loss(t: float) -> float:
        return F.cross_entropy(logits / t, labels).item()

    assert loss(temperature) <= min(loss(temperature * each) for each in (0.5, 0.99, 1.01, 2))
    before, after = (calibration((logits / t).softmax(1), labels) for t in (1, temperature))
    assert after.ece < before.ece and after.nll < before.nll
    assert (after.accuracy, after.aurc) == (before.accuracy, pytest.approx(before.aurc, abs=0.02))


def test_temperature_of_cases_that_are_all_right_ends_at_the_limit():
    assert fit_temperature(torch.eye(3), torch.arange(3), limit=10) == pytest.approx(0.1)
    assert fit_temperature(-torch.eye(3), torch.arange(3), limit=10) == pytest.approx(10)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"\[n, K\] .*\[2, 3\] and \[3\]"):
        calibration(torch.ones(2, 3) / 3, torch.zeros(3, dtype=torch.int64))
