"""Which cases are seen when: a function of seed and epoch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.training.batch_plan import BatchPlan

PLAN = BatchPlan(seed=3, num_cases=49, batch_size=16, epochs=7, eval_every=3)
CPU = torch.device("cpu")


def order(plan, epoch):
    return torch.cat(list(plan.batches(epoch, CPU))).tolist()


@given(st.integers(1, 100), st.integers(1, 33), st.integers(0, 10**6))
def test_every_case_once_an_epoch(num_cases, batch_size, epoch):
    plan = replace(PLAN, num_cases=num_cases, batch_size=batch_size)
    batches = list(plan.batches(epoch, CPU))
    assert len(batches) == plan.steps_per_epoch
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    assert sorted(torch.cat(batches).tolist()) == list(range(num_cases))


def test_order_follows_from_seed_and_epoch():
    first = order(PLAN, 5)
    torch.manual_seed(1)
    order(PLAN, 2)
    assert order(PLAN, 5) == first
    assert order(PLAN, 6) != first
    assert order(replace(PLAN, seed=4), 5) != first


def test_rounds_share_out_the_epochs():
    rounds = [list(PLAN.epochs_of(index)) for index in range(PLAN.num_rounds)]
    assert rounds == [[0, 1, 2], [3, 4, 5], [6]]
    assert PLAN.total_steps == 7 * 4


@given(st.integers(1, 60), st.integers(1, 33), st.integers(1, 40), st.integers(1, 13))
def test_a_run_of_steps_has_full_batches_and_sees_every_case_in_turn(cases, batch, steps, every):
    plan = BatchPlan(3, cases, batch, epochs=1, eval_every=every, steps=steps)
    rounds = [list(plan.batches_of(index, CPU)) for index in range(plan.num_rounds)]
    assert [len(each) for each in rounds] == [len(plan.steps_of(i)) for i in range(len(rounds))]
    batches = [batch for each in rounds for batch in each]
    assert [len(each) for each in batches] == [batch] * steps
    seen = torch.cat(batches)
    for epoch, part in enumerate(seen.split(cases)):
        expected = order(replace(plan, steps=None), epoch)
        assert part.tolist() == expected[: len(part)]
    assert plan.epochs_after(steps) == pytest.approx(steps * batch / cases, abs=1e-3)


def test_rounds_of_epochs_have_the_batches_of_their_epochs():
    found = [each.tolist() for each in PLAN.batches_of(2, CPU)]
    assert found == [each.tolist() for each in PLAN.batches(6, CPU)]
    assert PLAN.steps_of(2) == range(24, 28)
    assert PLAN.epochs_after(24) == 6


def drawn(plan, round_index, process):
    with torch.random.fork_rng():
        plan.reseed(round_index, process, torch.device("cpu"))
        return torch.randint(2**40, ()).item()


@pytest.mark.parametrize("change", ["seed", "round", "process"])
def test_random_numbers_follow_from_seed_round_and_process(change):
    first = drawn(PLAN, 2, 1)
    assert drawn(PLAN, 2, 1) == first
    others = {
        "seed": (replace(PLAN, seed=4), 2, 1),
        "round": (PLAN, 1, 1),
        "process": (PLAN, 2, 0),
    }
    assert drawn(*others[change]) != first
