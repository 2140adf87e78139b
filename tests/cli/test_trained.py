"""`primal evaluate` and `primal predict`: what was trained, used."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from primal_attention.tasks import load_uea

from .command import primal, told

AEON = Path(importlib.util.find_spec("aeon").submodule_search_locations[0])
TEST_FILE = AEON / "datasets" / "data" / "JapaneseVowels" / "JapaneseVowels_TEST.ts"


def outcome(directory):
    return json.loads((directory / "result.json").read_text())


def predictions(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def unlabelled(lines):
    """The same file without classes."""
    in_data = False
    for line in lines:
        if line.lower().startswith("@classlabel"):
            yield "@classLabel false"
        elif in_data:
            yield line.rpartition(":")[0]
        else:
            in_data = line == "@data"
            yield line


@pytest.mark.parametrize(("split", "key"), [("test", "value"), ("valid", "valid")])
def test_evaluation_finds_what_training_found(trained, split, key):
    for place in (trained, trained / "best.safetensors"):
        result = primal("evaluate", place, "--split", split)
        assert result.exit_code == 0, result.output
        assert f"{split} accuracy {outcome(trained)[key]:.2f}" in result.stdout


def test_evaluation_refuses_other_data(trained, tmp_path):
    (tmp_path / "other").mkdir()
    shutil.copy(TEST_FILE, tmp_path / "other")
    lines = TEST_FILE.with_name("JapaneseVowels_TRAIN.ts").read_text().splitlines()
    (tmp_path / "other" / "JapaneseVowels_TRAIN.ts").write_text("\n".join(lines[:-1]))
    result = primal("evaluate", trained, "--data", tmp_path / "other")
    assert result.exit_code == 2
    assert "not those that the model was trained on" in told(result)


def test_predictions_are_as_good_as_the_test_said(trained, tmp_path):
    result = primal("predict", TEST_FILE, "--checkpoint", trained)
    assert result.exit_code == 0, result.output
    found = predictions(tmp_path / "predictions.csv")
    labels = load_uea("JapaneseVowels")[1].labels
    correct = [row["label"] == label for row, label in zip(found, labels, strict=True)]
    assert 100 * np.mean(correct) == pytest.approx(outcome(trained)["value"])
    assert [row["case"] for row in found] == [str(i) for i in range(len(labels))]
    for row in found:
        probabilities = {name: float(row[f"probability_{name}"]) for name in set(labels)}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
        assert probabilities[row["label"]] == max(probabilities.values())


def test_labels_are_not_needed(trained, tmp_path):
    lines = TEST_FILE.read_text().splitlines()
    (tmp_path / "new.ts").write_text("\n".join(unlabelled(lines)))
    primal("predict", TEST_FILE, "--checkpoint", trained, "--out", "a.csv")
    result = primal("predict", "new.ts", "--checkpoint", trained, "--out", "b.csv")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.csv").read_text() == (tmp_path / "b.csv").read_text()


def test_arrays_are_read(trained, tmp_path):
    series = load_uea("JapaneseVowels")[1].series
    length = series[3].shape[1]
    same_length = [i for i, case in enumerate(series) if case.shape[1] == length]
    np.save(tmp_path / "new.npy", np.stack([series[i] for i in same_length]))
    primal("predict", TEST_FILE, "--checkpoint", trained, "--out", "all.csv")
    primal("predict", "new.npy", "--checkpoint", trained, "--out", "some.csv")
    every, some = (predictions(tmp_path / name) for name in ("all.csv", "some.csv"))
    assert [row["label"] for row in some] == [every[i]["label"] for i in same_length]


def test_mistakes_are_named_and_leave_nothing(trained, tmp_path):
    np.save(tmp_path / "flat.npy", np.zeros((3, 5)))
    np.save(tmp_path / "five.npy", np.zeros((3, 5, 7)))
    text = TEST_FILE.read_text()
    (tmp_path / "cut.ts").write_text(text[:100])
    (tmp_path / "bad.ts").write_text("@classLabel false\n@data\n1,2:3,x\n")
    (tmp_path / "x.csv").write_text("1,2")
    shutil.copy(trained / "last.safetensors", tmp_path / "last.safetensors")
    before = sorted(tmp_path.rglob("*"))
    files = {
        "none.ts": "No such file",
        "flat.npy": "[cases, channels, length], got shape (3, 5)",
        "five.npy": "case 0 must have shape [12 channels, length], got (5, 7)",
        "cut.ts": "the file ends without a line @data",
        "bad.ts": "FILE: bad.ts, line 3: value 2 of channel 2, 'x'",
        "x.csv": "must end in .ts or .npy, got '.csv'",
    }
    for file, message in files.items():
        result = primal("predict", file, "--checkpoint", trained)
        assert result.exit_code == 2
        assert message in told(result), file
    checkpoints = {
        "none.safetensors": "no checkpoint is at none.safetensors",
        "x.csv": "no safetensors file, or a damaged one",
        "last.safetensors": "give the best.safetensors of a run directory",
    }
    for checkpoint, message in checkpoints.items():
        for command in (["predict", TEST_FILE, "--checkpoint"], ["evaluate"]):
            result = primal(*command, checkpoint)
            assert result.exit_code == 2
            assert message in told(result), checkpoint
    result = primal("predict", TEST_FILE, "--checkpoint", trained, "--out", "no/where.csv")
    assert "--out: no/where.csv must be a file in a folder that exists" in told(result)
    result = primal("evaluate", trained, "--split", "tset")
    assert "'tset'; did you mean test?" in told(result)
    assert sorted(tmp_path.rglob("*")) == before
