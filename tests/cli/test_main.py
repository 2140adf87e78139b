"""`primal` by itself, and without what it needs."""

import builtins
import subprocess
import sys

import pytest

import primal_attention
from primal_attention import cli
from primal_attention.training import find_recipe

from .command import TASK, primal, told, train

COMMANDS = [
    "train",
    "evaluate",
    "predict",
    "generate",
    "spectrum",
    "report",
    "table",
    "sweep",
    "settings",
    "data",
    "check",
    "bench",
]


def without(monkeypatch, missing):
    """Make a package one that is not installed."""
    imported = builtins.__import__

    def found(name, *args, **kwargs):
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", found)


def test_alone_it_lists_the_commands():
    result = primal()
    assert result.exit_code == 0
    for command in COMMANDS:
        assert f" {command} " in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = primal(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.stdout


def test_it_says_its_version():
    assert primal("--version").stdout.strip() == f"primal-attention {primal_attention.__version__}"


def test_help_shows_brackets_that_are_no_markup():
    assert ".npy [cases, channels, length]" in told(primal("predict", "--help"))


def test_settings_of_a_recipe_can_be_given_back():
    listed = primal("settings", TASK, "--model", "primal_plus").stdout.splitlines()
    recipe = find_recipe(TASK, "primal_plus", "clean")
    again = recipe.with_settings(listed)
    assert again.replace(attention=recipe.model.attention) == recipe
    assert "attention.samples_per_direction=10" in listed


def test_it_is_a_module_too():
    run = subprocess.run(
        [sys.executable, "-m", "primal_attention.cli", "--help"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "sweep" in run.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_it_says_what_to_install(monkeypatch, missing):
    without(monkeypatch, missing)
    monkeypatch.setattr(sys, "argv", ["primal"])
    with pytest.raises(SystemExit, match=r"pip install 'primal-attention\[cli\]'"):
        cli.main()


def test_without_fabric_it_says_what_to_install(monkeypatch, tmp_path):
    without(monkeypatch, "lightning_fabric")
    result = train()
    assert result.exit_code == 2
    assert "pip install 'primal-attention[train]'" in told(result)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("missing", "arguments"),
    [
        ("optuna", ["sweep", TASK, "--model", "linear", "--sampler", "tpe"]),
        ("safetensors", ["predict", "x.ts", "--checkpoint", "x.safetensors"]),
    ],
)
def test_other_extras_are_named(monkeypatch, missing, arguments):
    without(monkeypatch, missing)
    result = primal(*arguments)
    assert result.exit_code == 2
    assert "pip install 'primal-attention[train]'" in told(result)
