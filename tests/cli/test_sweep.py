"""`primal sweep`: trials are run once, and the best is a command."""

import shlex

import pytest

from primal_attention.cli import sweep as sweep_module
from primal_attention.training import Watcher

from .command import SMALL, TASK, primal, sets, told

FOLDER = "uea-JapaneseVowels-primalformer-clean-seed0-grid"


def sweep(*arguments, model="primalformer"):
    return primal("sweep", TASK, "--model", model, *sets(*SMALL, "epochs=1"), *arguments)


def trials(tmp_path, study=FOLDER):
    return len(list((tmp_path / "runs" / "sweeps" / study).rglob("recipe.json")))


def test_a_grid_goes_on_where_it_was(tmp_path):
    first = sweep("--trials", 2)
    assert first.exit_code == 0, first.output
    assert trials(tmp_path) == 2
    again = sweep("--trials", 3)
    assert f"{FOLDER}: 2 trials are done" in told(again)
    assert trials(tmp_path) == 3
    assert "3 trials; the best" in again.stdout
    assert "validation" in again.stdout


def test_the_best_is_a_command_that_runs(tmp_path):
    found = sweep("--sampler", "tpe", "--trials", 2, "--quiet", model="softmax")
    assert found.exit_code == 0, found.output
    assert found.stderr == ""
    head, command = found.stdout.strip().splitlines()
    value = float(head.partition("has ")[2].split()[0])
    program, *arguments = shlex.split(command)
    assert program == "primal"
    result = primal(*arguments)
    assert result.exit_code == 0, result.output
    assert f"validation cases ({value:.2f}" in told(result)


def test_an_interrupted_trial_is_taken_up_again(tmp_path, monkeypatch):
    grid = {"attention.num_directions": (2, 3), "eta": (0.1,)}
    monkeypatch.setattr("primal_attention.training.sweeps.PAPER_GRID", grid)

    class Interrupted(Watcher):
        def round(self, entry):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sweep_module, "progress_bar", lambda console: Interrupted())
        stopped = sweep("--trials", 1)
    assert stopped.exit_code == 130
    assert "the same command goes on" in told(stopped)
    assert not list(tmp_path.rglob("result.json"))
    assert "2 trials; the best" in sweep().stdout
    assert trials(tmp_path) == 2
    assert len(list(tmp_path.rglob("result.json"))) == 2


def test_selection_on_test_cases_is_said(tmp_path):
    result = sweep("--protocol", "paper", "--trials", 1)
    assert "warning: the paper's protocol selects settings on the test cases" in told(result)
    assert "on the test cases:" in result.stdout
    refused = sweep("--set", "valid_fraction=none")
    assert refused.exit_code == 2
    assert "--protocol paper does that openly" in told(refused)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampler", "gird"], "sampler must be one of grid, tpe, got 'gird'"),
        (["--trials", "0"], "--trials"),
        (["--set", "lrr=3"], "did you mean lr?"),
    ],
)
def test_mistakes_are_named(tmp_path, arguments, message):
    result = sweep(*arguments)
    assert result.exit_code == 2
    assert message in told(result)
    assert not (tmp_path / "runs").exists()


def test_a_study_keeps_its_settings(tmp_path):
    shared = ["--study", "mine", "--trials", 1]
    assert sweep(*shared).exit_code == 0
    other = sweep(*shared, "--set", "lr=0.01")
    assert other.exit_code == 2
    assert "is about other settings (lr=0.001); choose another name" in told(other)
    assert "does not have; use --sampler tpe" in told(sweep(model="flow"))
