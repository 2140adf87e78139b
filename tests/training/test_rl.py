"""Decision Transformers in the training loop, and the policies that come of it."""

import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from primal_attention.tasks.offline_rl import RL, Trial
from primal_attention.tasks.offline_rl.trajectories import Trajectories
from primal_attention.training import build_model, find_recipe, launch, task_of, train, train_in
from primal_attention.training.checkpoint import BEST, write_checkpoint
from primal_attention.training.domains.rl import RELEASED
from primal_attention.training.results import add_rows, read_rows
from primal_attention.training.rollouts import (
    missing_rows,
    read_policies,
    try_policy,
)

from .toy import one_process

NAME, K = "hopper-medium", 5
SMALL = ["dim=12", "num_heads=2", "ffn_dim=17", "num_tokens=15", "batch_size=13", "steps=40"]
SMALL += ["eval_every=20", "valid_fraction=0.2"]


def small(model="primal_plus", *settings, seed=0):
    options = ["attention.num_directions=3"] if "primal" in model else []
    return find_recipe(f"rl/{NAME}", model, "clean", seed).with_settings(
        [*SMALL, *options, *settings]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Episodes in which the action is a function of the state."""
    folder, rng = tmp_path_factory.mktemp("rl"), np.random.default_rng(0)
    lengths = rng.integers(3, 40, 31)
    states = rng.normal(size=(lengths.sum(), 11))
    actions = np.tanh(states @ rng.normal(size=(11, 3)))
    flags = np.ones(len(lengths), bool)
    found = Trajectories(states, actions, rng.normal(size=len(states)), lengths, flags)
    RL.write(folder / f"{NAME}.npz", found)
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """The directory of a run that is over."""
    recipe, place = small(), tmp_path_factory.mktemp("run")
    train_in(place, recipe, task_of(recipe, folder), one_process())
    return place


def test_the_recipes_are_the_papers():
    for name, directions in RELEASED.items():
        recipe = find_recipe(f"rl/{name}", "primal_plus", "paper")
        assert recipe.model.attention["num_directions"] == directions
        assert (recipe.optim.steps, recipe.optim.warmup * recipe.optim.steps) == (100_000, 10_000)
        model = recipe.model
        assert (model.dim, model.num_heads, model.num_layers, recipe.optim.eta) == (256, 4, 3, 0.05)
    assert find_recipe(f"rl/{NAME}", "softmax", "paper").optim.eta == 0
    with pytest.raises(ValueError, match="did you mean one of hopper-medium"):
        find_recipe("rl/hopper-mediu", "softmax", "clean")


@pytest.mark.parametrize("model", ["softmax", "primal_plus", "primalformer", "linear", "flow"])
def test_it_learns(folder, model):
    recipe = small(model, "lr=3e-2", "schedule=constant", "dropout=0")
    outcome = train(recipe, task_of(recipe, folder), one_process())
    first, last = outcome.rounds[0], outcome.rounds[-1]
    assert outcome.metric == "action_mse"
    assert last["train_loss"] < 0.8 * first["train_loss"]
    assert ("primal" in model) == (last["objective"] != 0)


def test_only_the_last_layer_of_primal_plus_is_primal(folder):
    recipe = small()
    sizes = task_of(recipe, folder).sizes
    model = build_model(recipe, sizes)
    kinds = [type(block.attn).__name__ for block in model.host.encoder.h]
    assert kinds[2] == "TransformersAttention"
    assert set(kinds[:2]) == {"DecisionTransformerGPT2Attention"}
    idle = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert idle
    assert all("predict_state" in n or "predict_return" in n or "wte" in n for n in idle)


def test_windows_of_a_recipe_are_whole_steps(folder):
    for wrong in ("num_tokens=16", "valid_fraction=none", "valid_fraction=0"):
        with pytest.raises(ValueError, match=r"valid_fraction .* num_tokens a multiple of 3"):
            task_of(small("softmax", wrong), folder)


class Asking(TorchDispatchMode):
    """Notes what would make a program wait for its device."""

    waits = ("_local_scalar_dense", "nonzero", "equal.default", "unique", "masked_select")

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in self.waits):
            self.asked.append(str(function))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("model", ["softmax", "primal_plus", "primalformer", "linear", "flow"])
def test_a_step_asks_nothing_of_the_device(folder, model):
    recipe = small(model, "clip_norm=none")
    task = task_of(recipe, folder)
    network = build_model(recipe, task.sizes)
    indices = torch.arange(13)
    with Asking() as mode:
        batch = task.train[indices]
        task.goal.losses(network(**batch.inputs), batch.target).mean().backward()
    assert mode.asked == []
    with Asking() as mode:
        bool(torch.ones(()) > 0)
    assert mode.asked


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["softmax", "primal_plus", "primalformer", "linear", "flow"])
def test_a_replayed_run_is_the_run(folder, model):
    outcomes = []
    for graph in ("true", "false"):
        recipe = small(model, f"graph={graph}", "dropout=0")
        fabric = launch("fp32", accelerator="cuda", devices=1)
        outcomes.append(train(recipe, task_of(recipe, folder), fabric))
    replayed, plain = (outcome.rounds[-1]["train_loss"] for outcome in outcomes)
    assert replayed == pytest.approx(plain, rel=1e-3)


def test_a_policy_acts_as_the_model_that_was_trained(run, folder):
    found = read_policies(run)
    assert found.rounds["last"]["step"] == 40
    assert found.recipe.set_name == NAME
    task = task_of(found.recipe, folder)
    batch = task.train[torch.arange(7)]
    models = {name: found.model(name) for name in ("last", "best")}
    best = found.rounds["best"]["step"]
    with torch.no_grad():
        ours = {name: model(**batch.inputs) for name, model in models.items()}
    assert torch.equal(ours["last"], ours["best"]) == (best == 40)
    np.testing.assert_allclose(found.encoding.mean, task.encoding.mean)


def test_rows_of_both_checkpoints_once(run, tmp_path, monkeypatch):
    found, results = read_policies(run), tmp_path / "results.csv"
    trial = Trial(3600.0, 2, seed=7)
    rows = list(missing_rows(found, trial, "window", [], commit="0" * 9))
    assert [row["selection"] for row in rows] == ["last", "best"]
    add_rows(results, rows)
    read = read_rows(results)
    assert {row["selection"] for row in read} == {"last", "best"}
    rollout = try_policy(found, "last", trial)
    assert float(read[0]["return"]) == pytest.approx(rollout.returns.mean(), abs=0.01)
    score = (rollout.returns.mean() + 20.272305) / (3234.3 + 20.272305) * 100
    assert float(read[0]["value"]) == pytest.approx(score, abs=1e-3)
    assert read[0]["metric"] == "return"
    assert float(read[0]["margin"]) > 0
    assert not list(missing_rows(found, trial, "window", read, commit=""))
    other = list(missing_rows(found, trial._replace(target=9.0), "state", read, commit=""))
    assert {row["selection"] for row in other} == {
        "last, state, target 9",
        "best, state, target 9",
    }
    same = found._replace(rounds=dict.fromkeys(("last", "best"), found.rounds["last"]))
    tried = []
    monkeypatch.setattr(
        "primal_attention.training.rollouts.try_policy",
        lambda *given, **named: tried.append(given) or rollout,
    )
    assert len(list(missing_rows(same, trial, "window", [], commit=""))) == 2
    assert len(tried) == 1


def test_a_run_of_something_else_is_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        read_policies(run / "nothing")
    facts = {"recipe": find_recipe("uea/Heartbeat", "linear", "clean").to_json()}
    write_checkpoint(tmp_path / BEST, {}, facts)
    with pytest.raises(ValueError, match="a run of uea/Heartbeat, which has no environment"):
        read_policies(tmp_path)


def test_training_needs_no_simulator(folder, monkeypatch):
    for name in ("gymnasium", "mujoco", "minari", "h5py"):
        monkeypatch.setitem(sys.modules, name, None)
    recipe = small("primal_plus", "steps=1", "eval_every=1")
    assert train(recipe, task_of(recipe, folder), one_process()).steps == 1
