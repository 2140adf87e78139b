"""`primal table`: what is shown and left out."""

from pathlib import Path

import pytest

from primal_attention.training import find_recipe
from primal_attention.training.results import COLUMNS, add_rows, key_of

from .command import primal, told

REPRODUCTION = Path(__file__).parents[2] / "reproduction"


def write_results(path, runs):
    """Runs are (set, model, protocol, seed, value, settings)."""
    rows = []
    for name, model, protocol, seed, value, settings in runs:
        recipe = find_recipe(f"uea/{name}", model, protocol, seed).with_settings(settings)
        row = dict.fromkeys(COLUMNS, "") | key_of(recipe)
        rows.append(row | {"metric": "accuracy", "value": str(value)})
    add_rows(path, rows)


@pytest.fixture
def results(tmp_path):
    path = tmp_path / "results.csv"
    runs = [("Handwriting", "primalformer", "paper", s, 27.0 + s, []) for s in range(3)]
    runs += [("Heartbeat", "primalformer", "paper", 0, 75.0, [])]
    runs += [("Heartbeat", "primalformer", "clean", 0, 71.0, ["precision=bf16"])]
    runs += [("Heartbeat", "primalformer", "clean", 1, 99.0, ["epochs=7"])]
    runs += [("Heartbeat", "softmax_bn", "paper", 0, 74.0, [])]
    write_results(path, runs)
    return path


def table(*arguments):
    return primal("table", *arguments, "--folder", REPRODUCTION)


def test_paper_and_ours_stand_side_by_side(results):
    result = table("uea", "--results", results)
    assert result.exit_code == 0, result.output
    lines = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    cells = {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}
    assert cells["Handwriting"][:3] == ["29.6", "28.0 ± 2.5 (3)", "-"]
    assert cells["Heartbeat"] == ["76.1", "75.0 (1)", "71.0 (1)", "-", "74.0 (1)", "-"]
    assert cells["PEMS-SF"] == ["89.6", "-", "-", "-", "-", "-"]
    assert cells["average"] == ["76.1", "75.0 (1)", "71.0 (1)", "-", "74.0 (1)", "-"]
    notes = told(result)
    assert "Averages are over what every column has: Heartbeat." in notes
    assert "not shown: Trans., Linear., Re." in notes
    assert "1 runs that are not of the table are left out:" in notes


def test_columns_and_protocols_are_chosen(results):
    shown = ["--column", "softmax", "--column", "primalformer", "--protocol", "paper"]
    result = table("table1", "--results", results, *shown)
    assert "Trans." in result.stdout
    assert "softmax_bn" not in result.stdout
    assert "clean protocol" not in result.stdout


def test_a_narrow_terminal_gets_several_tables(results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = table("uea", "--results", results).stdout.splitlines()
    assert sum("Handwriting" in line for line in lines) == 2
    assert max(len(line) for line in lines if line.startswith("│")) <= 80


def test_runs_of_here_are_shown_where_the_suite_has_none(results, tmp_path):
    folder = tmp_path / "suite" / "table1_uea"
    folder.mkdir(parents=True)
    expected = next(REPRODUCTION.glob("**/table1_uea/expected.toml"))
    (folder / "expected.toml").write_text(expected.read_text())
    (tmp_path / "runs").mkdir()
    results.rename(tmp_path / "runs" / "results.csv")
    result = primal("table", "uea", "--folder", "suite")
    assert "28.0 ± 2.5 (3)" in result.stdout
    assert "7 runs in runs/results.csv" in told(result)


@pytest.mark.parametrize("name", ["table6_eta_s", "table8_projection"])
def test_the_other_tables(name, tmp_path):
    write_results(tmp_path / "none.csv", [])
    result = table(name, "--results", "none.csv")
    assert result.exit_code == 0, result.output
    assert f"Table {name[5]}" in result.stdout
    assert "Averages" in result.stdout


def test_mistakes_are_named(results):
    write_results(results, [("Heartbeat", "primalformer", "clean", 1, 70.0, [])])
    mistakes = {
        ("ueo",): "no table is called 'ueo'",
        ("uea", "--results", "none.csv"): "--results: there is no file none.csv",
        ("uea", "--results", results, "--column", "sofmax"): "'sofmax'; did you mean softmax",
        ("uea", "--results", results, "--protocol", "claen"): "'claen'; did you mean clean?",
        ("uea", "--results", results, "--set", "lrr=3"): "'lrr'; did you mean lr?",
        ("uea", "--results", results): "different settings (the defaults; precision=bf16); choose",
    }
    for arguments, message in mistakes.items():
        result = table(*arguments)
        assert result.exit_code == 2, arguments
        assert message in told(result)
    chosen = table("uea", "--results", results, "--set", "precision=bf16")
    assert "71.0 (1)" in chosen.stdout
    result = primal("table", "uea")
    assert "no table is in the folder reproduction; give the folder" in told(result)
