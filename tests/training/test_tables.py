"""Tables: the paper's numbers are those printed, and each run counts in its own cell alone."""

import importlib.util
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from primal_attention.training import find_recipe
from primal_attention.training.results import COLUMNS, Estimate, key_of
from primal_attention.training.tables import (
    fill,
    find_expected,
    other_schedules,
    printed_in,
    read_expected,
)

REPRODUCTION = Path(__file__).parents[2] / "reproduction"
FOLDERS = sorted(path.parent for path in REPRODUCTION.glob("**/expected.toml"))
TABLE1 = read_expected(find_expected("uea", REPRODUCTION))


def row(recipe, value=50.0, metric="accuracy"):
    return dict.fromkeys(COLUMNS, "") | key_of(recipe) | {"value": str(value), "metric": metric}


def recipe(*settings, name="Heartbeat", model="primalformer", protocol="paper", seed=0):
    return find_recipe(f"uea/{name}", model, protocol, seed).with_settings(settings)


def key(name):
    return (("dataset", name),)


def ours(table, name="Heartbeat", column="primalformer", protocol="paper"):
    return table.value(key(name), column, protocol)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_printed_averages_are_those_of_the_columns(folder):
    """A digit that was copied wrongly would show; two of the averages are themselves wrong."""
    values = tomllib.loads((folder / "expected.toml").read_text())
    expected = read_expected(folder / "expected.toml")
    names = {dict(key)["dataset"] for key, _ in expected.printed}
    assert len(names) == {"uea": 10, "lra": 5, "language": 1, "rl": 9, "images": 2}[expected.domain]
    wrong = {"longformer": 72.28, "performer": 71.68} if folder.name == "table1_uea" else {}
    for column, printed in zip(expected.headings, values.get("average", ()), strict=False):
        numbers = [n for (_, each), n in expected.printed.items() if each == column]
        right = wrong.get(column, printed)
        assert sum(numbers) / len(numbers) == pytest.approx(right, abs=0.0501)


def test_the_tables_of_the_arena_agree_with_each_other():
    """Primal.+ in Table 9 has the numbers of Table 2, once its heads are put right."""
    table2 = read_expected(find_expected("lra", REPRODUCTION))
    table9 = read_expected(find_expected("table9", REPRODUCTION))
    assert len(table9.printed) == 2 * 5
    for each in dict.fromkeys(each for each, _ in table9.printed):
        assert table9.printed[each, "sampled"] == table2.printed[each, "primal_plus"]


def test_a_row_that_the_paper_does_not_have():
    """It is shown, and takes nothing away from the averages of what the paper has."""
    table2 = read_expected(find_expected("lra", REPRODUCTION))
    runs = [
        row(find_recipe(f"lra/{name}", "softmax", "paper"), value)
        for name, value in (("listops", 30.0), ("retrieval-imdb", 90.0))
    ]
    table = fill(table2, runs)
    assert table.left_out == ()
    assert ours(table, "retrieval-imdb", "softmax").mean == 90.0
    assert table.value(key("retrieval-imdb"), "softmax", "printed") is None
    assert table.average("softmax", "paper").mean == 30.0
    assert table.average("softmax", "printed") == 37.1


def test_a_shortened_schedule_is_shown_and_told():
    """In tables that allow for it; that of the recipe is not told."""
    table2 = read_expected(find_expected("lra", REPRODUCTION))
    short = row(find_recipe("lra/image", "softmax", "paper").with_settings(["steps=8000"]), 40.0)
    whole = row(find_recipe("lra/listops", "softmax", "paper"), 30.0)
    table = fill(table2, [short, whole])
    assert table.left_out == ()
    assert ours(table, "image", "softmax").mean == 40.0
    assert other_schedules(table) == ["8000 of 35000 steps (image)"]


def test_schedules_that_are_counted_in_epochs():
    short = replace(TABLE1, free=frozenset({"epochs"}))
    runs = [
        row(recipe("epochs=7", name="Heartbeat")),
        row(recipe("epochs=7", name="Handwriting")),
        row(recipe(name="JapaneseVowels")),
    ]
    assert other_schedules(fill(short, runs)) == ["7 of 100 epochs (Heartbeat, Handwriting)"]
    assert other_schedules(fill(TABLE1, runs)) == []


def test_the_tables_agree_with_each_other():
    """PrimalFormer's best in Table 6 and Primal.+ in Table 8 are the numbers of Table 1."""
    table6 = read_expected(find_expected("table6", REPRODUCTION))
    table8 = read_expected(find_expected("table8", REPRODUCTION))
    for name in {dict(each)["dataset"] for each in TABLE1.keys}:
        grid = [n for (each, _), n in table6.printed.items() if dict(each)["dataset"] == name]
        assert len(grid) == 12
        assert max(grid) == TABLE1.printed[key(name), "primalformer"]
        assert table8.printed[key(name), "sampled"] == TABLE1.printed[key(name), "primal_plus"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_recipe_of_a_folder_has_its_cell(folder):
    """The runs of recipes.py all count, each seed in a cell once."""
    spec = importlib.util.spec_from_file_location("recipes", folder / "recipes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    expected = read_expected(folder / "expected.toml")
    recipes = [each.with_settings(["precision=bf16"]) for each in module.recipes()]
    rows = [row(each, metric=expected.metric) for each in recipes]
    if expected.selection is not None:
        rows = [each | {"selection": expected.selection} for each in rows]
    table = fill(expected, rows)
    assert table.left_out == ()
    counts = [each.seeds for each in table.numbers.values() if isinstance(each, Estimate)]
    assert sum(counts) == len(rows)
    assert max(counts) <= 5


def test_runs_of_other_settings_are_left_out():
    plain, other = row(recipe(), 75.0), row(recipe("lr=0.5", "eta=0.9"), 1.0)
    table = fill(TABLE1, [plain, other])
    assert ours(table).mean == 75.0
    assert table.left_out == (other,)
    chosen = fill(TABLE1, [plain, other], settings=["lr=0.5", "eta=0.9"])
    assert ours(chosen).mean == 1.0
    assert chosen.left_out == (plain,)


def test_runs_in_other_precision_are_not_mixed():
    rows = [row(recipe(seed=0), 75.0), row(recipe("precision=bf16", seed=1), 77.0)]
    assert ours(fill(TABLE1, rows[:1])).mean == 75.0
    assert ours(fill(TABLE1, rows[1:])).mean == 77.0
    with pytest.raises(ValueError, match=r"Heartbeat, primalformer, paper.*precision=bf16"):
        fill(TABLE1, rows)
    assert ours(fill(TABLE1, rows, settings=["precision=bf16"])).mean == 77.0
    assert ours(fill(TABLE1, rows, settings=["precision=fp32"])).mean == 75.0


def test_how_a_step_is_computed_is_what_is_timed():
    table3 = read_expected(find_expected("efficiency", REPRODUCTION))
    plain = find_recipe("lra/listops", "softmax", "paper")
    compiled = plain.with_settings(["compile=true"])
    rows = [row(plain, 8.0, "seconds"), row(compiled, 6.0, "seconds")]
    for settings, mean in (((), 8.0), (("compile=true",), 6.0)):
        assert ours(fill(table3, rows, settings=settings), "listops", "softmax").mean == mean


def test_a_run_counts_once():
    rows = [row(recipe(), 75.0), row(recipe(), 77.0), row(recipe(seed=1), 79.0)]
    found = ours(fill(TABLE1, rows))
    assert (found.mean, found.seeds) == (78.0, 2)


def test_what_is_not_there_is_not_made_up():
    table = fill(TABLE1, [row(recipe(protocol="clean"), 71.0)])
    assert table.columns == ("primalformer",)
    assert ours(table) is None
    assert table.value(key("PEMS-SF"), "primalformer", "clean") is None
    assert table.average("primalformer", "paper") is None
    assert fill(TABLE1, []).columns == tuple(TABLE1.headings)


def test_averages_are_over_what_all_columns_have():
    """A column without any number does not count; one with a gap takes the row away from all."""
    rows = [row(recipe(name=name), value) for name, value in (("Heartbeat", 70), ("PEMS-SF", 80))]
    table = fill(TABLE1, rows)
    assert table.common_keys() == (key("Heartbeat"), key("PEMS-SF"))
    assert table.average("primalformer", "paper").mean == 75.0
    assert table.average("primalformer", "printed") == pytest.approx((76.1 + 89.6) / 2)
    table = fill(TABLE1, [*rows, row(recipe(model="softmax_bn"), 60.0)])
    assert table.common_keys() == (key("Heartbeat"),)
    assert table.average("primalformer", "paper").mean == 70.0
    assert table.average("softmax_bn", "printed") is None


def test_rows_that_belong_elsewhere():
    elsewhere = row(recipe(name="BasicMotions"))
    table = fill(TABLE1, [elsewhere])
    assert table.left_out == (elsewhere,)
    with pytest.raises(ValueError, match="metric 'mse', the table has 'accuracy'"):
        fill(TABLE1, [row(recipe(), metric="mse")])


def test_the_number_of_a_recipe():
    assert printed_in(REPRODUCTION, recipe("lr=0.5")) == (76.1, "Table 1")
    assert printed_in(REPRODUCTION, recipe(model="softmax_bn")) is None
    returns = find_recipe("rl/hopper-medium", "primal_plus", "paper")
    assert printed_in(REPRODUCTION, returns) is None  # training measures errors


def test_mistakes_are_named(tmp_path):
    with pytest.raises(ValueError, match="'tabel1_uea'; did you mean table1_uea"):
        find_expected("tabel1_uea", REPRODUCTION)
    with pytest.raises(FileNotFoundError, match="no table is in the folder"):
        find_expected("uea", tmp_path)
    with pytest.raises(ValueError, match="'sofmax'; did you mean softmax"):
        fill(TABLE1, [], columns=["sofmax"])
    path = tmp_path / "expected.toml"
    for text in (
        "title = ",
        "title = 'x'",
        "columns = [1, 2]\nrows = [{dataset = 'A', paper = [1]}]",
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a table of expected numbers"):
            read_expected(path)
