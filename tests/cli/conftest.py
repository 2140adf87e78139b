"""A run that the tests look at, and a folder of its own for each test."""

import pytest

from .command import train


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No data, runs or results of anyone else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRIMAL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The directory of a run that is over."""
    out = tmp_path_factory.mktemp("trained")
    result = train("--out", out, "--quiet", "--set", "eval_every=2")
    assert result.exit_code == 0, result.output
    (directory,) = (out / "uea" / "JapaneseVowels" / "linear" / "clean").iterdir()
    return directory
