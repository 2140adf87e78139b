"""Data that the reproduction makes with policies, and policies in the environment."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from primal_attention.tasks.offline_rl import (
    ENVIRONMENTS,
    RL,
    RL_SETS,
    TrajectoryEncoding,
    Trial,
    roll_out,
)
from primal_attention.tasks.offline_rl.environments import make_environment

from .toy_rl import HOPPER, trajectories, write_agents

NAME = "hopper-medium"
SCRIPT = "reproduction/primal_attention/table4_d4rl/make_sets.py"


@pytest.fixture(scope="module")
def making():
    """The program that makes the sets."""
    spec = importlib.util.spec_from_file_location("make_sets", Path(__file__).parents[2] / SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_command_makes_the_same_set(making, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(making, "CHUNK", 60)
    monkeypatch.chdir(tmp_path)
    agents = write_agents(tmp_path / "agents")

    def make(out, seed):
        options = ["--out", str(out), "--transitions", "130", "--seed", str(seed)]
        monkeypatch.setattr(sys, "argv", ["", str(agents), NAME, *options])
        making.main()
        return out / f"{NAME}.npz"

    path = make(tmp_path / "one", 5)
    found = RL.read(path)
    assert 130 <= len(found.rewards) < 330
    assert found.terminated.all()  # it falls
    facts = found.facts
    assert facts["name"] == "D4RL-like/hopper-medium"
    assert facts["environment"] == "Hopper-v5"
    assert f"mean score {facts['mean_score']}" in capsys.readouterr().out
    returns = HOPPER.score(found.returns)
    assert facts["mean_score"] == pytest.approx(returns.mean(), abs=0.01)
    (behaviour,) = facts["behaviours"].items()
    assert behaviour[0] == "Hopper-sac.npz sampled"
    assert behaviour[1]["transitions"] == len(found.rewards)
    assert make(Path("two"), 5).read_bytes() == path.read_bytes()
    other = RL.read(make(tmp_path / "three", 6))
    assert not np.array_equal(other.states[:5], found.states[:5])
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert not list(tmp_path.glob("MUJOCO*"))


def test_mixtures_have_all_their_shares(making):
    for name in RL_SETS:
        mixture = making.mixture_of(name)
        assert sum(mixture.values()) == pytest.approx(1)
        chunks = making.chunks_of(name, 30_000, 0)
        assert sum(each.transitions for each in chunks) == pytest.approx(30_000, abs=5)
        assert len({each.seed for each in chunks}) == len(chunks)
    assert len(making.mixture_of("hopper-medium-expert")) == 3


def test_noise_of_policies(making, tmp_path):
    agent = making.Agent(write_agents(tmp_path) / "Hopper-sac.npz", HOPPER)
    state = np.linspace(-1, 1, 11)
    plain = agent.act(state, 0, np.random.default_rng(0), 0.0)
    assert np.array_equal(plain, agent.act(state, 0, np.random.default_rng(1), 0.0))
    assert not np.array_equal(plain, agent.act(state, 0, np.random.default_rng(1), "sampled"))
    rng = np.random.default_rng(0)
    around = np.stack([agent.act(state, 0, rng, 0.05) for _ in range(400)])
    inside = np.abs(plain) < 0.8
    assert inside.any()
    np.testing.assert_allclose(around.mean(0)[inside], plain[inside], atol=0.02)
    np.testing.assert_allclose(around.std(0)[inside], 0.05, atol=0.01)
    x = np.clip((state - 0.5) / 2, -10, 10)
    hidden = np.maximum(agent.arrays["w0"] @ x, 0)
    np.testing.assert_allclose(plain, np.tanh(agent.arrays["w1"] @ hidden), 1e-5)


def test_policies_that_do_not_fit_are_refused(making, tmp_path):
    folder = write_agents(tmp_path / "a", obs_dim=12)
    with pytest.raises(
        ValueError, match=r"sac.npz is not a policy of Hopper \(it has .* \(12, 3\)"
    ):
        making.Agent(folder / "Hopper-sac.npz", HOPPER)
    timed = {"time_feature": True, "time_limit": 1000, "w0": np.zeros((5, 12), np.float32)}
    statistics = {"obs_mean": np.zeros(12), "obs_var": np.ones(12)}
    made = write_agents(tmp_path / "b", obs_dim=12, **timed, **statistics)
    assert making.Agent(made / "Hopper-sac.npz", HOPPER)
    cut = write_agents(tmp_path / "e", w1=np.zeros((3, 4), np.float32))
    with pytest.raises(ValueError, match=r"sac.npz is not a policy of Hopper .*mismatch"):
        making.Agent(cut / "Hopper-sac.npz", HOPPER)
    endless = write_agents(tmp_path / "f", n_layers=10**9)
    with pytest.raises(ValueError, match=r"sac.npz is not a policy .*KeyError: 'w2'"):
        making.Agent(endless / "Hopper-sac.npz", HOPPER)
    with pytest.raises(FileNotFoundError, match="no policy"):
        making.make_set("hopper-medium-expert", write_agents(tmp_path / "c"))
    silent = making.Agent(write_agents(tmp_path / "d", noise="none") / "Hopper-sac.npz", HOPPER)
    with pytest.raises(ValueError, match="draws no random actions"):
        silent.act(np.zeros(11), 0, np.random.default_rng(0), "sampled")
    (tmp_path / "c" / "Hopper-sac.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"sac.npz is not a policy of Hopper"):
        making.make_set(NAME, tmp_path / "c")
    with pytest.raises(ValueError, match="transitions"):
        making.make_set(NAME, tmp_path / "a", transitions=0)


class Noted:
    """Does the same in all episodes, and notes what it was told."""

    def __init__(self, action):
        self.action, self.asked, self.states = action, [], []

    def act(self, states, returns_to_go):
        self.states.append(states)
        self.asked.append(returns_to_go[:, 0].tolist())
        return torch.full((len(states), 3), self.action)

    def keep(self, kept):
        assert len(kept) < len(self.asked[-1])


@pytest.mark.parametrize("version", [5, 4])
def test_episodes_side_by_side_are_those_one_by_one(version, tmp_path):
    encoding = TrajectoryEncoding.fit(trajectories())
    policy = Noted(2.0)  # clipped to 1
    found = roll_out(policy, encoding, HOPPER, Trial(3600, 3, seed=11, version=version))
    simulator = make_environment(HOPPER, version)
    for index in range(3):
        state, _ = simulator.reset(seed=11 + index)
        assert torch.equal(policy.states[0][index], encoding.states(state))
        earned, length, over = 0.0, 0, False
        while not over:
            _, reward, terminated, truncated, _ = simulator.step(np.ones(3, np.float32))
            earned, length, over = earned + reward, length + 1, terminated or truncated
        assert found.returns[index] == pytest.approx(earned)
        assert found.lengths[index] == length
    assert policy.asked[0] == pytest.approx([3.6] * 3)
    assert len(policy.asked) == found.lengths.max()
    assert policy.asked[1][0] < 3.6


def test_a_video(tmp_path):
    from PIL import Image

    encoding, place = TrajectoryEncoding.fit(trajectories()), tmp_path / "videos" / "one.gif"
    try:
        roll_out(Noted(1.0), encoding, HOPPER, Trial(1.0, 2), video=place)
    except Exception as error:  # no way to draw on this machine
        if not re.search(r"opengl|\begl\b|gladload|osmesa|glfw", str(error), re.IGNORECASE):
            raise
        pytest.skip(f"nothing to draw with: {error}")
    with Image.open(place) as image:
        assert image.n_frames > 1


def test_what_to_install_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'primal-attention\[rl\]'"):
        make_environment(HOPPER)


def test_wrong_versions_and_numbers():
    with pytest.raises(ValueError, match=r"version must be one of \(5, 4\), got 3"):
        make_environment(ENVIRONMENTS["walker2d"], 3)
    with pytest.raises(ValueError, match="episodes must be at least 1"):
        roll_out(Noted(0.0), TrajectoryEncoding.fit(trajectories()), HOPPER, Trial(1.0, 0))
