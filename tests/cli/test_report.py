"""`primal report` on runs that trained for a moment."""

import json

import pytest

from .command import primal, told, train


def test_it_writes_one_page(trained, tmp_path):
    result = primal("report", trained, "--cases", 3)
    assert result.exit_code == 0, result.output
    assert "report.html: 1 run" in told(result)
    page = (tmp_path / "report.html").read_text()
    value = json.loads((trained / "result.json").read_text())["value"]
    assert f"{value:.4g}" in page
    assert "uea/JapaneseVowels, linear" in page
    assert "on 3 test cases" in page


def test_several_runs_on_one_page(trained, tmp_path):
    assert train("--out", tmp_path / "runs", "--quiet", "--seed", 3).exit_code == 0
    (other,) = (tmp_path / "runs" / "uea/JapaneseVowels/linear/clean").iterdir()
    result = primal("report", trained, other, "--cases", 0, "--out", "both.html")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "both.html").read_text()
    assert "linear, seed 0" in page
    assert "linear, seed 3" in page
    assert "no cases were asked for" in page


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], "no run directory is at nowhere"),
        (["--data", "nowhere"], "nowhere"),
        (["--out", "no/where.html"], "a file in a folder that exists"),
        (["--cases", "-1"], "--cases"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(trained, tmp_path, arguments, named):
    before = sorted(tmp_path.rglob("*"))
    result = primal("report", trained, *arguments)
    assert result.exit_code == 2
    assert named in told(result)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_is_not_over_is_refused(trained, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_bytes((trained / "recipe.json").read_bytes())
    result = primal("report", "run")
    assert result.exit_code == 2
    assert "no run is over in run: there is no result.json" in told(result)
    assert not (tmp_path / "report.html").exists()
