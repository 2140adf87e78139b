"""`primal spectrum` on a run that trained for a moment."""

import csv

import pytest

from primal_attention.cli.spectrum import short_names

from .command import primal, told, train

NUMBERS = ("directions", "effective_rank", "entropy", "asymmetry", "redundancy")


def test_it_shows_a_table_and_writes_a_figure_and_two_files(trained, tmp_path):
    result = primal("spectrum", trained, "--cases", 11)
    assert result.exit_code == 0, result.output
    said = told(result)
    assert "linear: attention layers" in said
    assert "effective" in said and "deviations are in spectrum.csv" in said
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
def test_every_number_can_be_read_in_80_columns(model, tmp_path, monkeypatch):
    assert train("--out", tmp_path / "runs", "--quiet", model=model).exit_code == 0
    (run,) = (tmp_path / "runs" / "uea/JapaneseVowels" / model / "clean").iterdir()
    monkeypatch.setenv("COLUMNS", "80")
    result = primal("spectrum", run, "--cases", 3)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "…" not in result.stdout
    assert max(map(len, lines[:-1])) <= 80  # the last has paths
    with (tmp_path / "spectrum.csv").open() as file:
        for number, row in enumerate(csv.DictReader(file)):
            (cells,) = [line.split() for line in lines if line.split()[:1] == [str(number)]]
            assert cells[1] == row["attention"]
            for cell, name in zip(cells[3:], NUMBERS, strict=False):
                mean = float(row[name])
                assert cell == ("-" if mean != mean else f"{mean:.3g}")
            assert len(cells) == 3 + len(NUMBERS) + 1


@pytest.mark.parametrize(
    ("names", "labels", "pattern"),
    [
        (["a.b.0.x", "a.b.1.x", "a.b.11.x"], ["0", "1", "11"], "a.b.*.x"),
        (["a.0.x", "a.0.y"], ["x", "y"], "a.0.*"),
        (["0.a.a", "0.a"], ["a.a", "a"], "0.*"),
        (["0.attention"], ["attention"], "0.*"),
        (["x"], ["x"], "*"),
        (["one.a", "other.a"], ["one", "other"], "*.a"),
    ],
)
def test_layers_are_told_apart_by_what_differs(names, labels, pattern):
    assert short_names(names) == (labels, pattern)


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
