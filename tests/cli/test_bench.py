"""`primal bench`: measures, writes, and holds against the targets."""

import csv

import pytest

from .command import primal, told

TINY = ["--tokens", 3, "--tokens", 7, "--total", 14, "--dim", 6, "--heads", 2, "--directions", 3]
HEADER = "mechanism,weights,causal,n,batch,dim,heads,directions,dtype,pass,gpu_ms,wall_ms,peak_mib"
FORM = "{},{},False,1024,64,512,8,32,bfloat16,fwd+bwd,{},{},100"


@pytest.fixture
def results(tmp_path):
    """A file of made-up results, with the columns that every file has."""
    rows = [FORM.format("projections", "", 1, 1), FORM.format("primal", "static", 1.4, 2)]
    path = tmp_path / "card_torch2.11.0_2026-01-01.csv"
    path.write_text("\n".join([f"{HEADER},commit", *(f"{row},abc" for row in rows)]) + "\n")
    return path


def test_it_measures_and_writes_rows(tmp_path):
    chosen = ["--mechanism", "softmax", "--mechanism", "primal-static"]
    result = primal("bench", *chosen, *TINY, "--out", tmp_path / "results")
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "results").iterdir()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["mechanism"] for row in rows} == {"copy", "softmax", "primal", "crossover"}
    assert all(row["commit"] for row in rows)
    assert "crossover (static, fwd+bwd): N =" in told(result)


def test_it_holds_results_against_the_targets(results):
    result = primal("bench", "--results", results)
    assert result.exit_code == 0, result.output
    assert "static / projections N=1024 1.4 <= 1.5 met" in told(result)
    assert "eager wall / GPU N=1024 1.429 <= 1.5 met" in told(result)
    assert "2 met, 0 missed" in told(result)
    assert "commits: abc" in told(result)


def test_a_target_that_is_missed_is_an_exit_code(results):
    results.write_text(results.read_text().replace("1.4", "1.6"))
    result = primal("bench", "--results", results, "--check")
    assert result.exit_code == 1
    assert "static / projections N=1024 1.6 <= 1.5 missed" in told(result)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "huge"], "there is no preset 'huge'"),
        (["--mechanism", "sofmax"], "nothing called 'sofmax' can be timed"),
        (["--dim", 0], "dim must be at least 1, got 0"),
        (["--results", "none.csv", "--check"], "there is no file none.csv"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(arguments, said, tmp_path):
    result = primal("bench", *arguments)
    assert result.exit_code == 2
    assert said in told(result)
    assert not list(tmp_path.iterdir())
