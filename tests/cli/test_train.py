"""`primal train`: where a run goes, what it says, and how it goes on."""

import csv
import json
from pathlib import Path

import pytest

from primal_attention.cli import train as train_module
from primal_attention.cli.arguments import recipe_of
from primal_attention.training import Watcher
from primal_attention.training.run_directory import directory_of

from .command import SMALL, TASK, primal, sets, told, train

REPRODUCTION = Path(__file__).parents[2] / "reproduction"


class Interrupted(Watcher):
    """Ctrl-C after the second epoch."""

    def round(self, entry):
        if entry["epoch"] == 2:
            raise KeyboardInterrupt


def rows(out):
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def only_run(out, model="linear"):
    (directory,) = (out / TASK / model / "clean").iterdir()
    return directory


def test_a_run_that_is_interrupted_goes_on(tmp_path, monkeypatch):
    """Its outcome is that of a run that was not; then the same command just reads it."""
    with monkeypatch.context() as patched:
        patched.setattr(train_module, "progress_bar", lambda console: Interrupted())
        stopped = train("--save-every", 0)
    assert stopped.exit_code == 130
    assert "the same command goes on" in told(stopped)
    assert not (tmp_path / "runs" / "results.csv").exists()

    resumed = train("--save-every", 0)
    assert resumed.exit_code == 0, resumed.output
    assert "going on from the last checkpoint" in told(resumed)
    assert "after epoch 1" in told(resumed)
    again = train()
    assert "this run is over" in told(again)
    assert again.stdout == resumed.stdout

    whole = train("--out", "whole", "--quiet")
    assert whole.stderr == ""
    (ours,), (theirs,) = rows(tmp_path / "runs"), rows(tmp_path / "whole")
    seconds = ours.pop("seconds"), theirs.pop("seconds")
    assert all(float(each) > 0 for each in seconds)
    assert ours == theirs


def test_the_outcome_is_told_with_what_to_do_next(tmp_path):
    (tmp_path / "reproduction").symlink_to(REPRODUCTION)
    result = train("--seed", 5)
    assert result.exit_code == 0, result.output
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    told_of = {name: value.strip() for name, value in lines.items()}
    (row,) = rows(tmp_path / "runs")
    directory = only_run(tmp_path / "runs")
    assert float(told_of["test accuracy"]) == pytest.approx(float(row["value"]), abs=0.006)
    assert told_of["the paper"] == "99.2 (Table 1)"
    assert "validation" in told_of["selection"]
    assert row["seed"] == "5"
    assert directory.name.startswith("seed5-")
    command = told_of["evaluate it"].split()
    assert command[0] == "primal"
    evaluated = primal(*command[1:])
    assert f"test accuracy {told_of['test accuracy']}" in evaluated.stdout


def test_settings_have_a_place_of_their_own(tmp_path):
    def place(*settings, seed=0):
        return directory_of(tmp_path, recipe_of(TASK, "primalformer", "clean", seed, settings))

    plain = place()
    assert plain == tmp_path / "uea" / "JapaneseVowels" / "primalformer" / "clean" / "seed0"
    assert place("eta=0.1") == plain  # as in the named recipe
    changed = place("lr=5e-4")
    assert changed.name.startswith("seed0-")
    assert len({plain, changed, place("lr=4e-4"), place("attention.num_directions=7")}) == 4
    assert place("lr=5e-4", "eta=0.3") == place("eta=0.3", "lr=5e-4")
    assert place("lr=5e-4", seed=3).name == changed.name.replace("seed0", "seed3")


def test_a_loss_that_is_no_number_is_no_traceback(tmp_path):
    result = primal("train", TASK, "--model", "linear", *sets(*SMALL, "lr=1e30", "clip_norm=none"))
    assert result.exit_code == 1
    assert "try a lower lr than 1e+30" in told(result)
    assert not (tmp_path / "runs" / "results.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["uea/JapaneseVowel", "--model", "flow"], "did you mean one of JapaneseVowels?"),
        (["JapaneseVowels", "--model", "flow"], "for instance uea/JapaneseVowels, got"),
        (["ueo/JapaneseVowels", "--model", "flow"], "'ueo'; did you mean uea or audio?"),
        ([TASK, "--model", "primalfromer"], "'primalfromer'; did you mean primalformer"),
        ([TASK, "--model", "flow", "--protocol", "claen"], "'claen'; did you mean clean?"),
        ([TASK, "--model", "flow", "--seed", "-1"], "seed must be not negative, got -1"),
        ([TASK, "--model", "flow", "--set", "epoch=3"], "--set: no setting is called 'epoch'; did"),
        ([TASK, "--model", "flow", "--set", "lr=fast"], "lr must be a float, got 'fast'"),
        ([TASK, "--model", "flow", "--set", "lr"], "a setting is key=value, got 'lr'"),
        ([TASK, "--model", "flow", "--set", "seed=3"], "seed is given as --seed, got 'seed=3'"),
        ([TASK, "--model", "flow", "--set", "optimizer=rdam"], "did you mean radam"),
        ([TASK, "--model", "flow", "--set", "pooling=maen"], "one of 'mean', 'class_token'"),
        ([TASK, "--model", "flow", "--set", "num_heads=7"], "dim must be a multiple of num_heads"),
        (
            [TASK, "--model", "primalformer", "--set", "attention.num_direction=3"],
            "primal attention has no option 'num_direction'; did you mean num_directions",
        ),
        ([TASK, "--model", "flow", "--strategy", "dp"], "one of auto, ddp, fsdp, got 'dp'"),
        ([TASK, "--model", "flow", "--accelerator", "abacus"], "abacus"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(tmp_path, arguments, message):
    result = primal("train", *arguments)
    assert result.exit_code == 2
    assert message in told(result)
    assert "Traceback" not in told(result)
    assert not (tmp_path / "runs").exists()


def test_a_directory_of_another_recipe_is_not_touched(tmp_path):
    directory = directory_of(tmp_path / "runs", recipe_of(TASK, "linear", "clean", 0, SMALL))
    directory.mkdir(parents=True)
    other = json.loads(recipe_of(TASK, "linear", "clean", 0, ["lr=0.5"]).to_json())
    (directory / "recipe.json").write_text(json.dumps(other))
    result = train()
    assert result.exit_code == 2
    assert "holds a run of another recipe" in told(result)
    assert [file.name for file in directory.iterdir()] == ["recipe.json"]


def test_a_logger_gets_the_numbers_of_each_round(tmp_path):
    refused = train("--logger", "comet")
    assert refused.exit_code == 2
    assert "logger must be one of" in " ".join(told(refused).split())
    done = train("--logger", "tensorboard")
    assert done.exit_code == 0, done.output
    assert list(only_run(tmp_path / "runs").glob("events.out.tfevents.*"))
