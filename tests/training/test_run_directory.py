"""The files of a run: complete at any moment, without gaps or repeats after a resume."""

import csv
import json

import pytest
import torch

from primal_attention.training import Watcher, read_outcome, train_in

from .toy import Interrupted, one_process, toy_recipe, toy_task

FABRIC = one_process()
TASK = toy_task()
FILES = ["best.safetensors", "last.safetensors", "metrics.csv", "recipe.json", "result.json"]


def metrics(directory):
    with (directory / "metrics.csv").open() as file:
        return [{name: float(text) for name, text in row.items()} for row in csv.DictReader(file)]


def interrupted(recipe, directory, epoch, **options):
    with pytest.raises(KeyboardInterrupt):
        train_in(directory, recipe, TASK, FABRIC, watcher=Interrupted(epoch), **options)


def test_files_of_a_run(tmp_path):
    outcome = train_in(tmp_path / "a" / "run", toy_recipe(), TASK, FABRIC)
    directory = tmp_path / "a" / "run"
    assert sorted(path.name for path in directory.iterdir()) == FILES
    assert metrics(directory) == outcome.rounds
    result = json.loads((directory / "result.json").read_text())
    assert result["value"] == outcome.value
    assert result["recipe"] == json.loads((directory / "recipe.json").read_text())
    assert result["recipe"]["model"] == "primalformer"


@pytest.mark.parametrize("save_every", [0, 1e6])
def test_logs_of_a_resumed_run_have_no_gaps_and_no_repeats(tmp_path, save_every):
    recipe = toy_recipe(epochs=7)
    for epoch in (3, 5):
        interrupted(recipe, tmp_path / "parts", epoch, save_every=save_every)
        assert len(metrics(tmp_path / "parts")) == epoch
    parts = train_in(tmp_path / "parts", recipe, TASK, FABRIC)
    train_in(tmp_path / "whole", recipe, TASK, FABRIC)
    assert metrics(tmp_path / "parts") == parts.rounds
    texts = [(tmp_path / run / "metrics.csv").read_bytes() for run in ("whole", "parts")]
    assert texts[0] == texts[1]


def test_rounds_that_were_not_saved_are_gone_once_it_goes_on(tmp_path):
    class AtOnce(Watcher):
        def step(self, step):
            raise KeyboardInterrupt

    interrupted(toy_recipe(), tmp_path, 3, save_every=1e6)
    with pytest.raises(KeyboardInterrupt):
        train_in(tmp_path, toy_recipe(), TASK, FABRIC, watcher=AtOnce())
    assert not (tmp_path / "metrics.csv").exists()


def test_outcome_of_a_run_that_is_over_is_read(tmp_path):
    class Silent(Watcher):
        def start(self, *_):
            raise AssertionError

    recipe = toy_recipe(attention={"num_directions": 3, "weights": "dual"})
    first = train_in(tmp_path, recipe, TASK, FABRIC)
    for again in (
        train_in(tmp_path, recipe, TASK, FABRIC, watcher=Silent()),
        read_outcome(tmp_path),
    ):
        weights = again.weights
        assert vars(again) | {"weights": 0} == vars(first) | {"weights": 0}
        assert all(torch.equal(weights[name], each) for name, each in first.weights.items())


def test_killed_after_the_last_round(tmp_path):
    first = train_in(tmp_path, toy_recipe(), TASK, FABRIC)
    (tmp_path / "result.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no run is over in .*: there is no result\.json"):
        read_outcome(tmp_path)
    assert train_in(tmp_path, toy_recipe(), TASK, FABRIC).value == first.value
    assert metrics(tmp_path) == first.rounds


def test_another_recipe_is_refused_before_anything_was_saved(tmp_path):
    interrupted(toy_recipe(), tmp_path, 1)
    with pytest.raises(ValueError, match=r"another recipe \(lr=0.001\)"):
        train_in(tmp_path, toy_recipe(lr=0.1), TASK, FABRIC)
