"""`primal spectrum` on a run that trained for a moment."""

import csv

import pytest

from .command import primal, told, train


def test_it_shows_a_table_and_writes_a_figure_and_two_files(trained, tmp_path):
    result = primal("spectrum", trained, "--cases", 11)
    assert result.exit_code == 0, result.output
    said = told(result)
    assert "linear" in said and "effective rank" in said
    assert "11 valid cases" in said
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "spectrum.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["attention"] == "linear"
    assert int(rows[0]["num_matrices"]) == 11 * 2
    with (tmp_path / "spectrum_curves.csv").open() as file:
        curves = list(csv.DictReader(file))
    assert {row["layer"] for row in curves} == {row["layer"] for row in rows}


@pytest.mark.parametrize("model", ["linear", "softmax_bn_sh", "primal_plus"])
def test_every_layer_has_its_numbers_and_a_suggestion(model, tmp_path):
    assert train("--out", tmp_path / "runs", "--quiet", model=model).exit_code == 0
    (run,) = (tmp_path / "runs" / "uea/JapaneseVowels" / model / "clean").iterdir()
    result = primal("spectrum", run, "--cases", 3, "--energy", 0.8)
    assert result.exit_code == 0, result.output
    assert "directions for 80% of the energy" in result.stdout
    with (tmp_path / "spectrum.csv").open() as file:
        for row in csv.DictReader(file):
            measured, suggested = [
                line.split() for line in result.stdout.splitlines() if row["layer"] in line.split()
            ]
            assert measured[1] == suggested[1] == row["attention"]
            assert float(measured[2]) == pytest.approx(float(row["num_tokens"]), rel=1e-3)


def test_two_models_beside_each_other(trained, tmp_path):
    assert train("--out", tmp_path / "runs", "--quiet", model="primal_plus").exit_code == 0
    (other,) = (tmp_path / "runs" / "uea/JapaneseVowels/primal_plus/clean").iterdir()
    result = primal("spectrum", other, "--against", trained, "--cases", 3, "--split", "test")
    assert result.exit_code == 0, result.output
    with (tmp_path / "spectrum.csv").open() as file:
        models = {row["model"]: row["attention"] for row in csv.DictReader(file)}
    assert models == {"primal_plus": "primal", "linear": "linear"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--split", "tset"], "test"),
        (["--energy", "2"], "energy must be in"),
        (["--out", "nowhere"], "a folder that exists"),
        (["--against", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_named_and_leave_nothing(trained, tmp_path, arguments, named):
    result = primal("spectrum", trained, *arguments)
    assert result.exit_code == 2
    assert named in told(result)
    assert not list(tmp_path.glob("spectrum*"))
