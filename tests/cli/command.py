"""`primal` called as from a shell, with settings that train in a second."""

from typer.testing import CliRunner

from primal_attention import cli

TASK = "uea/JapaneseVowels"
SMALL = ["dim=16", "num_heads=2", "ffn_dim=16", "epochs=3"]


def primal(*arguments):
    return CliRunner().invoke(cli.app(), [str(each) for each in arguments])


def told(result) -> str:
    """All that was said, on one line and without frames."""
    return " ".join((result.stdout + result.stderr).replace("│", " ").split())


def sets(*settings):
    """The settings as options."""
    return [part for setting in settings for part in ("--set", setting)]


def train(*arguments, model="linear"):
    return primal("train", TASK, "--model", model, *sets(*SMALL), *arguments)
