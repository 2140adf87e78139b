"""Learning rates against hand-computed ones, and torch's schedulers where they are the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

from primal_attention.training.schedules import SCHEDULES, lr_factor


def factors(schedule, total, warmup):
    return [lr_factor(schedule, step, total, warmup) for step in range(total)]


def torch_factors(total, make):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for step in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step < total - 1:
            scheduler.step()
    return found


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0.5, [1, 1, 1, 1]),
        ("warmup", 0.5, [0.25, 0.75, 1, 1]),
        ("warmup", 0.0, [1, 1, 1, 1]),
        ("warmup", 1.0, [0.125, 0.375, 0.625, 0.875]),
        ("one_cycle", 0.5, [0.25, 0.75, 0.75, 0.25]),
        ("one_cycle", 0.0, [0.875, 0.625, 0.375, 0.125]),
        ("one_cycle", 1.0, [0.125, 0.375, 0.625, 0.875]),
        ("cosine", 0.5, [0.25, 0.75, 0.8535533906, 0.1464466094]),
    ],
)
def test_four_steps_by_hand(schedule, warmup, expected):
    assert factors(schedule, 4, warmup) == pytest.approx(expected, abs=1e-9)


def test_warmup_is_linear_lr():
    total, w = 31, 13  # steps, and how many of them rise
    first, last = 0.5 / w, (w - 0.5) / w
    expected = torch_factors(w, lambda optimizer: LinearLR(optimizer, first, last, w - 1))
    assert factors("warmup", total, w / total) == pytest.approx(expected + [1.0] * (total - w))


def test_one_cycle_is_that_of_torch():
    total, top = 29, 7  # steps, and the one at the peak
    first, last = 1 / (2 * top + 1), 1 / (2 * (total - top) - 1)
    expected = torch_factors(
        total,
        lambda optimizer: OneCycleLR(
            optimizer,
            max_lr=1.0,
            total_steps=total,
            pct_start=(top + 1) / total,
            anneal_strategy="linear",
            cycle_momentum=False,
            div_factor=1 / first,
            final_div_factor=first / last,
        ),
    )
    assert factors("one_cycle", total, (top + 0.5) / total) == pytest.approx(expected)


def test_cosine_is_that_of_torch_at_the_middles():
    total = 23
    halves = torch_factors(2 * total, lambda optimizer: CosineAnnealingLR(optimizer, 2 * total))
    assert factors("cosine", total, 0.0) == pytest.approx(halves[1::2])


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 10**6),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_every_step_has_a_length_and_none_is_above_the_peak(schedule, total, warmup, where):
    assert 0 < lr_factor(schedule, int(where * total), total, warmup) <= 1
