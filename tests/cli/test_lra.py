"""`primal` on the Long Range Arena: trained, measured, listed."""

import json
from pathlib import Path

import numpy as np
import pytest

from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask
from primal_attention.training.results import read_rows

from .command import primal, sets, told

REPRODUCTION = Path(__file__).parents[2] / "reproduction"
SMALL = ["dim=8", "ffn_dim=13", "batch_size=10", "steps=9", "eval_every=4", "precision=fp32"]
N, SIZES = 23, PartSizes(31, 17, 19)


@pytest.fixture
def data(tmp_path):
    """A ListOps as small as it gets, where data are looked for."""
    write(tmp_path / "data" / "lra")


def write(folder, num_tokens=N, name="listops"):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 16, size=(sum(SIZES), num_tokens), dtype=np.uint8)
    targets = rng.integers(10, size=sum(SIZES), dtype=np.uint8)
    LRA.write(folder / f"{name}.npz", PreparedTask(name, SIZES, tokens, targets))


def train(*arguments, task="lra/listops"):
    options = ["--model", "primalformer", "--protocol", "paper", "--seed", "0", "--quiet"]
    settings = sets(*SMALL, "attention.num_directions=3")
    return primal("train", task, *options, *settings, *arguments)


def test_trained_and_measured(data, tmp_path):
    result = train()
    assert result.exit_code == 0, result.output
    assert "best step on validation cases" in told(result)
    (row,) = read_rows(tmp_path / "runs" / "results.csv")
    assert (row["dataset"], row["model"], row["protocol"]) == ("listops", "primalformer", "paper")
    assert {"steps=9", "pooling=padded_mean", "mask_primal=false"} <= set(row["settings"].split())
    (directory,) = (tmp_path / "runs" / "lra" / "listops" / "primalformer" / "paper").iterdir()
    found = json.loads((directory / "result.json").read_text())
    for split, key in (("test", "value"), ("valid", "valid")):
        measured = primal("evaluate", directory, "--split", split)
        assert measured.exit_code == 0, measured.output
        assert f"{split} accuracy {found[key]:.2f}" in measured.stdout
    assert "this run is over" in told(primal("train", "lra/listops", *again()))
    (tmp_path / "new.npy").write_bytes(b"")
    refused = primal("predict", "new.npy", "--checkpoint", directory)
    assert refused.exit_code == 2
    assert "a model of lra/listops reads no time series" in told(refused)
    write(tmp_path / "other", num_tokens=19)
    refused = primal("evaluate", directory, "--data", tmp_path / "other")
    assert refused.exit_code == 2
    assert "not those that the model was trained on" in told(refused)


def again():
    options = ["--model", "primalformer", "--protocol", "paper"]
    return [*options, *sets(*SMALL, "attention.num_directions=3")]


def test_mistakes_are_named_and_leave_nothing(tmp_path):
    assert "did you mean listops" in told(train(task="lra/listop"))
    assert "did you mean lra" in told(train(task="lraa/listops"))
    missing = train(task="lra/text")
    assert missing.exit_code == 2
    assert "aclImdb" in told(missing)
    assert not (tmp_path / "runs").exists()


def test_table_2_beside_ours(data):
    assert train().exit_code == 0
    result = primal(
        *("table", "lra", "--folder", REPRODUCTION, "--results", "runs/results.csv"),
        *sets(*SMALL, "attention.num_directions=3"),
    )
    assert result.exit_code == 0, result.output
    assert "Table 2" in result.stdout
    assert "37.3" in result.stdout
    assert "listops" in result.stdout


def test_data_of_the_arena_are_listed_and_prepared(data, tmp_path):
    listed = primal("data").stdout.splitlines()
    places = dict(line.split(maxsplit=1) for line in listed if line.startswith("lra/"))
    assert places["lra/listops"].endswith("listops.npz")
    assert places["lra/text"] == "not at hand"
    refused = primal("data", "lra")
    assert refused.exit_code == 2
    assert "name those to prepare" in told(refused)
    refused = primal("data", "lra", "text")
    assert refused.exit_code == 2
    assert "aclImdb" in told(refused)
