"""Rows of results: what they say, and files of them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from primal_attention.training import Outcome, Recipe, find_recipe
from primal_attention.training.results import (
    COLUMNS,
    add_rows,
    current_commit,
    read_rows,
    row_of,
    settings_of,
)


def outcome(seed: int = 0, value: float = 91.25, **settings: object) -> Outcome:
    recipe = Recipe("uea/Toy", "softmax", seed=seed, **settings)
    rounds = [{"epoch": 1.0, "valid_accuracy": 80.0}, {"epoch": 2.0, "valid_accuracy": 93.75}]
    return Outcome(recipe, "accuracy", value, 93.75, rounds, 1, 34, 2.5, "cpu", {})


def test_a_row_has_all_columns_and_says_how_it_was_chosen():
    row = row_of(outcome(), "abc1234")
    assert set(row) == set(COLUMNS)
    assert (row["dataset"], row["value"], row["valid"]) == ("Toy", "91.2500", "93.7500")
    assert (row["steps"], row["torch"], row["commit"]) == ("34", torch.__version__, "abc1234")
    assert row["selection"] == "best validation epoch"
    on_test = row_of(outcome(valid_fraction=None), "abc1234")
    assert on_test["selection"] == "best test epoch"


@pytest.mark.parametrize("model", ["primalformer", "primal_plus", "softmax"])
@pytest.mark.parametrize("protocol", ["paper", "clean"])
def test_settings_lead_back_to_the_recipe(model, protocol):
    recipe = find_recipe("uea/JapaneseVowels", model, protocol, seed=3)
    recipe = recipe.with_settings(["lr=5e-4", "clip_norm=none", "attention.scales=[1,2]"])
    plain = Recipe(recipe.task, model, protocol, seed=3)
    assert plain.with_settings(settings_of(recipe).split(" ")) == recipe


def test_rows_are_added_and_replaced(tmp_path):
    path = tmp_path / "new" / "results.csv"
    assert read_rows(path) == []
    add_rows(path, [row_of(outcome(seed), "abc1234") for seed in (10, 9)])
    add_rows(path, [row_of(outcome(9, value=50.0), "def5678")])
    rows = read_rows(path)
    assert [(row["seed"], row["value"]) for row in rows] == [("9", "50.0000"), ("10", "91.2500")]
    add_rows(path, [row_of(outcome(9, lr=0.5), "abc1234")])
    assert len(read_rows(path)) == 3


def test_two_writers_lose_nothing(tmp_path):
    path = tmp_path / "results.csv"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: add_rows(path, [row_of(outcome(seed), "abc")]), range(40)))
    assert len(read_rows(path)) == 40


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text("dataset,value\nToy,1\n")
    with pytest.raises(
        ValueError, match=r"results\.csv is no whole file of results: it lacks the columns commit"
    ):
        read_rows(path)


def test_the_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PRIMAL_COMMIT", "abc1234")
    assert current_commit() == "abc1234"
    monkeypatch.delenv("PRIMAL_COMMIT")
    monkeypatch.chdir(tmp_path)
    assert current_commit() == "unknown"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: data[:-30], "line 3 has no end: the file was cut off"),
        (lambda data: data[:-2], "line 3 has no end"),  # within the last column
        (lambda data: data[:-30] + b"\n", "line 3 has 11 cells, there are 15 columns"),
        (lambda data: data + b'"', "line 4 has no end"),
        (lambda data: data.replace(b"Toy", b"T\xff", 1), "can't decode byte 0xff"),
        (lambda data: data.replace(b",4,", b",four,", 1), "seed in line 3 must be a number, got"),
        (lambda data: b"\n", "it lacks the columns"),
        (lambda data: b"", "line 1 has no end"),
    ],
)
def test_a_damaged_file_is_named_and_stays_as_it_is(tmp_path, change, told):
    path = tmp_path / "results.csv"
    add_rows(path, [row_of(outcome(seed, lr=0.5), "abc") for seed in (3, 4)])
    data = change(path.read_bytes())
    path.write_bytes(data)
    for ask in (read_rows, lambda path: add_rows(path, [row_of(outcome(), "abc")])):
        with pytest.raises(ValueError, match=told) as raised:
            ask(path)
        assert str(path) in str(raised.value)
    assert path.read_bytes() == data


def test_columns_that_others_added_stay(tmp_path):
    path = tmp_path / "results.csv"
    add_rows(path, [{**row_of(outcome(1), "abc"), "episodes": "3"}])
    add_rows(path, [row_of(outcome(2), "abc")])
    assert [row["episodes"] for row in read_rows(path)] == ["3", ""]
    assert list(read_rows(path)[0]) == [*COLUMNS, "episodes"]
    assert [file.name for file in tmp_path.iterdir()] == ["results.csv"]
