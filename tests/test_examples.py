"""The demo runs at a small size and writes what it says."""

import csv
import runpy
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples/demo.py"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the libraries that hold the data and train
def test_demo_compares_accuracy_time_and_memory(tmp_path, monkeypatch, capsys):
    pytest.importorskip("aeon", reason="pip install 'primal-attention[timeseries]'")
    out = tmp_path / "demo.png"
    options = ["--seeds", "2", "--epochs", "1", "--tokens", "64", "128"]
    monkeypatch.setattr(sys, "argv", [str(DEMO), "--out", str(out), *options])
    runpy.run_path(str(DEMO), run_name="__main__")
    assert out.read_bytes().startswith(b"\x89PNG")
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["what"], row["attention"], row["seed"] or row["tokens"]) for row in rows}
    attentions = ("softmax", "primal", "primal_time")
    assert found == {
        (what, attention, key)
        for attention in attentions
        for what, keys in (
            ("accuracy", "01"),
            ("seconds", ("64", "128")),
            ("peak_mib", ("64", "128")),
        )
        for key in keys
    }
    assert all(float(row["value"]) > 0 for row in rows)
    assert "JapaneseVowels" in capsys.readouterr().out
