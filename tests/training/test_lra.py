"""Runs on the Long Range Arena: counted in steps, in pairs, under both protocols, in parts."""

import importlib
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from primal_attention.tasks import LRA_PROTOCOLS
from primal_attention.training import Watcher, build_model, task_of, train, train_in
from primal_attention.training.outcome import OutOfTimeError
from primal_attention.training.run_directory import directory_of

from .toy import one_process
from .toy_lra import N, small_recipe, write_listops, write_pairs

FABRIC = one_process()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the small tasks are, for whoever looks for data."""
    write_listops(tmp_path / "lra")
    write_pairs(tmp_path / "lra")
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path))
    return tmp_path / "lra"


def run(recipe, **options):
    return train(recipe, task_of(recipe), FABRIC, **options)


def assert_same(a, b):
    assert a.rounds == b.rounds
    assert (a.value, a.valid, a.best, a.steps) == (b.value, b.valid, b.best, b.steps)
    assert all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
@pytest.mark.parametrize("model", ["softmax", "primalformer", "primal_plus"])
def test_learns_listops(folder, model, protocol):
    outcome = run(small_recipe("listops", model, protocol, "steps=150", "warmup=0.1"))
    losses = [entry["train_loss"] for entry in outcome.rounds]
    assert losses[-1] < 0.6 * losses[0]
    assert outcome.value > 40  # of ten classes


@pytest.mark.parametrize("model", ["softmax", "primalformer"])
def test_learns_pairs(folder, model):
    settings = ["steps=200", "eval_every=40", "lr=0.03", "eta=0.1"]
    outcome = run(small_recipe("retrieval-imdb", model, "clean", *settings))
    losses = [entry["train_loss"] for entry in outcome.rounds]
    assert losses[-1] < 0.7 * losses[0]
    assert outcome.value > 75  # about a third of the pairs are of the same letter


def test_both_towers_count_in_the_objective(folder):
    """The two runs of the tower are averaged: swapping the sequences changes nothing."""
    recipe = small_recipe("retrieval-imdb", "primalformer", "paper", "eta=1", "dropout=0")
    recipe = recipe.with_settings(["steps=1", "batch_size=47", "head_hidden_dim=5"])
    task = task_of(recipe)
    x = task.train.inputs
    swapped = {"a": x["b"], "b": x["a"], "mask_a": x["mask_b"], "mask_b": x["mask_a"]}
    other = replace(task, train=replace(task.train, inputs=swapped))
    found, same = (train(recipe, each, FABRIC).rounds[0]["objective"] for each in (task, other))
    assert found == pytest.approx(same, rel=1e-5)
    assert found > 0


@pytest.mark.parametrize("name", ["listops", "retrieval-imdb"])
def test_a_compiled_model_trains_to_the_same(folder, compiled, name):
    recipe = small_recipe(name, "primalformer", "paper", "dropout=0", "eta=0.1")
    plain, same = run(recipe), run(recipe.with_settings(["compile=true"]))
    assert compiled == [True]  # one graph, and none for evaluations
    assert plain.weights.keys() == same.weights.keys()
    for entry, other in zip(plain.rounds, same.rounds, strict=True):
        assert entry == pytest.approx(other, rel=1e-4)
    assert plain.value == same.value


def test_each_run_of_a_process_is_compiled(folder, compiled):
    """However many there were before: recompilations are limited for each process."""
    recipe = small_recipe("listops", "linear", "clean", "compile=true", "steps=1")
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(3):
            run(recipe)
    assert compiled == [True] * 3


def test_rounds_are_counted_in_steps(folder):
    outcome = run(small_recipe())
    assert [entry["step"] for entry in outcome.rounds] == [7, 14, 21, 28, 35, 37]
    assert outcome.rounds[-1]["epoch"] == pytest.approx(37 * 10 / 49, abs=1e-3)
    assert outcome.steps == 37


def test_refit_of_a_run_of_steps(folder):
    plans = []

    class Noted(Watcher):
        def start(self, recipe, plan, progress):
            plans.append(plan)

    outcome = run(small_recipe("listops", "softmax", "clean", "refit=true"), watcher=Noted())
    assert plans[1].total_steps == outcome.rounds[outcome.best]["step"]
    assert plans[1].num_cases == plans[0].num_cases + 31


@pytest.mark.parametrize("model", ["primalformer", "primal_plus"])
def test_a_run_that_is_stopped_in_time_goes_on_as_if_it_had_not_been(folder, tmp_path, model):
    recipe = small_recipe("listops", model, "paper", "dropout=0.3")
    whole = run(recipe)
    directory = tmp_path / "parts"
    for steps in (7, 14):
        with pytest.raises(OutOfTimeError, match=f"after step {steps}$"):
            train_in(directory, recipe, task_of(recipe), FABRIC, until=0)
    parts = train_in(directory, recipe, task_of(recipe), FABRIC)
    assert_same(whole, parts)


def test_a_run_that_ends_in_time_is_not_out_of_it(folder, tmp_path):
    recipe = small_recipe("listops", "softmax", "paper", "steps=5")
    assert train_in(tmp_path / "run", recipe, task_of(recipe), FABRIC, until=0).steps == 5


def features(protocol, x, mask, model="softmax"):
    recipe = small_recipe("listops", model, protocol, "dropout=0")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = task_of(recipe).sizes
        return build_model(recipe, sizes).eval().tower(x, token_mask=mask)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
def test_padding_pools_under_the_protocol_that_says_so(folder, protocol):
    """Twelve tokens of padding shrink the mean over 11 others, or leave it alone."""
    x = torch.randint(1, 11, (3, N), dtype=torch.uint8)
    mask = torch.arange(N).expand(3, N) < 11
    short, long = features(protocol, x[:, :11], None), features(protocol, x, mask)
    shrunk = 11 / N if LRA_PROTOCOLS[protocol].pool_over_padding else 1.0
    torch.testing.assert_close(long, shrunk * short)


@pytest.mark.parametrize("protocol", ["paper", "clean"])
@pytest.mark.parametrize("model", ["primalformer", "primal_plus", "softmax"])
def test_padding_leaks_into_primal_layers_of_the_paper_alone(folder, model, protocol):
    """More padding, the same tokens: seen by the landmarks or not."""
    x = torch.randint(1, 11, (3, N), dtype=torch.uint8)
    masks = [torch.arange(n).expand(3, n) < 11 for n in (N, 17)]
    sums = []
    for mask in masks:
        tokens = mask.shape[1]
        scale = tokens if protocol == "paper" else 1
        sums.append(scale * features(protocol, x[:, :tokens], mask, model))
    same = torch.allclose(*sums, rtol=1e-4, atol=1e-5)
    assert same == (protocol == "clean" or model == "softmax")


def test_the_head_has_a_hidden_layer_and_no_dropout_before_it(folder):
    recipe = small_recipe("listops", "softmax", "clean", "dropout=0.5")
    model = build_model(recipe, task_of(recipe).sizes)
    assert model.hidden.out_features == 11
    assert not model.tower.drop_features


def test_validation_cases_are_those_of_the_protocol(folder):
    with pytest.raises(ValueError, match=r"valid_fraction of lra/listops is 0 .* got 0\.3"):
        task_of(small_recipe().with_settings(["valid_fraction=0.3"]))
    with pytest.raises(ValueError, match="UEA has no validation cases"):
        task_of(small_recipe().replace(task="uea/JapaneseVowels"))


def test_the_runner_of_tables_stops_and_goes_on(folder, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "reproduction"))
    runner = importlib.import_module("run")
    recipe = small_recipe("listops", "primalformer", "paper")
    _, whole = runner.run_one("table", recipe, "abc1234", None, math.inf)
    runs = tmp_path / "runs"
    with pytest.raises(OutOfTimeError):
        runner.run_one("table", recipe, "abc1234", runs, time.time())
    assert (directory_of(runs, recipe) / "last.safetensors").exists()
    _, parts = runner.run_one("table", recipe, "abc1234", runs, math.inf)
    assert whole | {"seconds": ""} == parts | {"seconds": ""}
    assert whole["selection"] == "best validation epoch"
    assert "steps=37" in whole["settings"].split()


def test_the_runner_generates_what_is_missing(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "reproduction"))
    runner = importlib.import_module("run")
    prepared = []
    monkeypatch.setattr(runner, "prepare_lra", lambda name, workers: prepared.append(name))
    tasks = ("lra/listops", "lra/pathfinder", "lra/pathfinder", "uea/JapaneseVowels", "lra/image")
    (folder / "cifar10_grey.npz").touch()
    runner.prepare([small_recipe().replace(task=task) for task in tasks])
    assert prepared == ["pathfinder", "image"]  # generated, and read from its files
