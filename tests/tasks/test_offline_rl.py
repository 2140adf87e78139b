"""Windows of trajectories, and what a model is measured by."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from primal_attention.tasks.offline_rl import RL, TrajectoryEncoding, Windows, rl_task
from primal_attention.tasks.offline_rl.windows import ACTIONS

from .toy_rl import LENGTHS, trajectories

K = 5


def windows(found, context=K):
    inputs = TrajectoryEncoding.fit(found).encode(found)
    return Windows(inputs, inputs["actions"], context)


def test_returns_to_go_are_sums_to_the_end_of_the_episode():
    found = trajectories()
    expected = [
        found.rewards[start + i : start + length].sum()
        for start, length in zip(found.starts, found.lengths, strict=True)
        for i in range(length)
    ]
    np.testing.assert_allclose(found.returns_to_go(), expected)
    np.testing.assert_allclose(found.returns_to_go()[found.starts], found.returns)


@given(st.integers(1, 30), st.integers(0, LENGTHS.sum() - 1))
@settings(deadline=None, max_examples=40)
def test_a_window_is_a_slice_of_its_episode(context, first):
    found = trajectories()
    encoding = TrajectoryEncoding.fit(found)
    batch = windows(found, context)[torch.tensor([first])]
    episode = int(np.searchsorted(np.cumsum(LENGTHS), first, side="right"))
    end = min(first + context, found.starts[episode] + LENGTHS[episode])
    real = end - first
    assert batch.inputs["token_mask"][0].tolist() == [True] * real + [False] * (context - real)
    standardised = (found.states[first:end] - encoding.mean) / encoding.std
    np.testing.assert_allclose(batch.inputs["states"][0, :real], standardised, 1e-5, 1e-5)
    np.testing.assert_allclose(batch.inputs["actions"][0, :real], found.actions[first:end], 1e-6)
    returns = found.returns_to_go()[first:end, None] / 1000
    np.testing.assert_allclose(batch.inputs["returns_to_go"][0, :real], returns, 1e-5)
    steps = np.arange(first, end) - found.starts[episode]
    assert batch.inputs["timesteps"][0, :real].tolist() == steps.tolist()
    assert batch.target[0, real:].isnan().all()
    assert torch.equal(batch.target[0, :real], batch.inputs["actions"][0, :real])
    for each in batch.inputs.values():
        assert not each[0, real:].any()


def test_windows_joined_are_those_of_both():
    one, other = trajectories(), trajectories(np.array([2, 13]), seed=1)
    encoding = TrajectoryEncoding.fit(one)

    def of(found):
        inputs = encoding.encode(found)
        return Windows(inputs, inputs["actions"], K)

    both = of(one).joined(of(other))
    assert len(both) == len(of(one)) + len(of(other))
    for index in (0, 40, len(of(one)), len(both) - 2):
        part, moved = (of(one), 0) if index < len(of(one)) else (of(other), len(of(one)))
        ours, theirs = both[torch.tensor([index])], part[torch.tensor([index - moved])]
        assert all(torch.equal(ours.inputs[name], theirs.inputs[name]) for name in ours.inputs)


def test_the_error_is_that_of_real_steps():
    target = windows(trajectories())[torch.arange(int(LENGTHS.sum()))].target
    outputs = torch.randn_like(target)
    real = ~target[..., 0].isnan()
    expected = (outputs - target)[real].square().mean()
    mean = ACTIONS.losses(outputs, target).sum() / ACTIONS.weights(target).sum()
    assert mean == pytest.approx(expected.item(), rel=1e-5)
    outputs.requires_grad_()
    ACTIONS.losses(outputs, target).sum().backward()
    assert outputs.grad.isfinite().all()
    assert not outputs.grad[~real].any()


def test_episodes_are_held_out_whole(tmp_path):
    RL.write(tmp_path / "hopper-medium.npz", trajectories())
    task = rl_task("hopper-medium", folder=tmp_path, context=K, valid=0.4, seed=3)
    assert (task.sizes.num_tokens, task.sizes.num_outputs, task.sizes.num_channels) == (15, 3, 11)
    assert len(task.train) + len(task.valid) == LENGTHS.sum()
    held = task.valid.inputs["timesteps"]
    assert (held == 0).sum() == 2  # of five episodes
    states = task.train.inputs["states"]
    assert states.mean(0).abs().max() < 1e-5
    assert (states.std(0, correction=0) - 1).abs().max() < 1e-5
    other = rl_task("hopper-medium", folder=tmp_path, context=K, valid=0.4, seed=5)
    assert len(other.train) != len(task.train)
    for wrong in ({"valid": 0.0}, {"context": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            rl_task("hopper-medium", folder=tmp_path, seed=0, **wrong)


def test_a_constant_number_of_a_state_is_not_scaled():
    found = trajectories()
    found.states[:, 2] = 7.0
    encoding = TrajectoryEncoding.fit(found)
    assert not encoding.states(found.states)[:, 2].any()
    again = TrajectoryEncoding.from_dict(encoding.to_dict())
    assert torch.equal(again.states(found.states), encoding.states(found.states))
