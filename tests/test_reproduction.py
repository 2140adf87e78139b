"""The reproduction suite: its recipes, what the paper printed, and the rows of our runs."""

import importlib.util
import re
import statistics
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from primal_attention.training.recipe import Recipe
from primal_attention.training.results import COLUMNS, key_of, read_rows

ROOT = Path(__file__).parents[1] / "reproduction"
FOLDERS = sorted(path.parent for path in ROOT.rglob("recipes.py"))
RESULTS = sorted(ROOT.rglob("results.csv"))
STUDIES = [("timeseries_defaults", "01"), ("ablations/training", "0")]  # and complete seeds
BOUNDS = {"perplexity": (1, 1e4), "return": (-10, 150)}  # an expert has 100, a good one more


def recipes_of(folder: Path) -> list[Recipe]:
    spec = importlib.util.spec_from_file_location("recipes", folder / "recipes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.recipes())


def means(rows: list[dict[str, str]], **wanted: str) -> dict[str, float]:
    """The mean value of each dataset over the rows that have those columns."""
    values: dict[str, list[float]] = {}
    for row in rows:
        if all(row[name] == value for name, value in wanted.items()):
            values.setdefault(row["dataset"], []).append(float(row["value"]))
    return {name: statistics.mean(each) for name, each in values.items()}


def told_by(folder: Path) -> dict[str, list[float]]:
    """The numbers that the page of a table has for each dataset."""
    lines = re.findall(
        r"^\| (\w+) \|([ \d.|]+)\|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    return {name: [float(cell) for cell in cells.split("|")] for name, cells in lines}


def test_there_is_something_to_reproduce():
    assert len(FOLDERS) >= 4
    assert RESULTS


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_recipes_are_runs_of_their_own(folder):
    keys = Counter(tuple(key_of(recipe).items()) for recipe in recipes_of(folder))
    assert keys
    assert max(keys.values()) == 1


def test_spoken_arabic_digits_never_trains_on_test_cases():
    tables = recipes_of(ROOT / "primal_attention" / "table1_uea")
    assert any("SpokenArabicDigits" in recipe.task for recipe in tables)
    clean = [recipe for recipe in tables if recipe.run.protocol == "clean"]
    assert clean
    assert all(recipe.data.valid_fraction for recipe in clean)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_rows_say_what_it_takes_to_run_them_again(path):
    rows = read_rows(path)
    assert rows
    known = {}
    for recipe in recipes_of(path.parent):
        known.setdefault((recipe.set_name, recipe.model.name, recipe.run.protocol), recipe)
    for row in rows:
        assert set(row) >= set(COLUMNS)
        assert re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]), row["commit"]  # a clean commit
        recipe = known[row["dataset"], row["model"], row["protocol"]]
        again = Recipe(recipe.task, recipe.model.name, recipe.run.protocol, seed=int(row["seed"]))
        assert (
            key_of(again.with_settings(row["settings"].split(" ")))["settings"] == (row["settings"])
        )
        if row["metric"] == "seconds":
            assert float(row["value"]) > 0 < float(row["peak_gb"])
            continue
        on_test = "valid_fraction=null" in row["settings"]
        assert on_test == (row["selection"] == "best test epoch")
        assert on_test == (recipe.data.valid_fraction is None)
        assert row["protocol"] == "paper" or not on_test
        low, high = BOUNDS.get(row["metric"], (0, 100))
        assert low <= float(row["value"]) <= high


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("run")


def chosen(runner, monkeypatch, *arguments):
    """The recipes that a command asks for, with their tables."""
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    choices = runner.choices(runner.parse_arguments())
    return [(each.table, recipe) for each in choices for recipe in each.recipes()]


def test_the_runner_finds_recipes_and_skips_what_is_done(runner, tmp_path, monkeypatch):
    command = "primal_attention/table1_uea", "--select", "seed=0", "--set", "precision=bf16"
    wanted = chosen(runner, monkeypatch, *command)
    everything, left = runner.missing(wanted, tmp_path), runner.missing(wanted, None)
    assert len(left) < len(everything) == len(wanted)
    assert {recipe.run.seed for _, recipe in everything} == {0}


def test_a_plan_names_recipes_with_changes_of_their_own(runner, tmp_path, monkeypatch):
    plan = tmp_path / "plan.toml"
    entry = """[[runs]]
table = "primal_attention/table2_lra"
select = ["dataset=image", "seed=0", "protocol=paper", "model=softmax"]
set = ["steps=%d"]
"""
    plan.write_text(entry % 80 + entry % 70 + entry % 80)
    wanted = chosen(runner, monkeypatch, "--plan", plan)
    assert [recipe.optim.steps for _, recipe in wanted] == [80, 70, 80]
    assert [recipe.optim.steps for _, recipe in runner.missing(wanted, tmp_path)] == [80, 70]


@pytest.mark.parametrize("text", ["runs = 3", "[[runs]]\nset = []", "[[run]]", "[[runs]", None])
def test_what_is_no_plan_is_named(runner, tmp_path, text):
    plan = tmp_path / "plan.toml"
    if text is not None:
        plan.write_text(text)
    with pytest.raises(SystemExit, match=r"plan\.toml is not a plan of \[\[runs\]\]"):
        runner.read_plan(plan)


def test_the_plan_of_the_arena_is_what_we_ran(runner, monkeypatch):
    """Every row of these tables is of a run that it names."""
    wanted = chosen(runner, monkeypatch, "--plan", ROOT / "arena.toml")
    keys = {(table, *runner.run_of(key_of(recipe))) for table, recipe in wanted}
    assert len(keys) == len(wanted)
    tables = [f"primal_attention/{name}" for name in ("table2_lra", "table9_projection")]
    for table in tables:
        rows = read_rows(ROOT / table / "results.csv")
        assert rows
        assert {(table, *runner.run_of(row)) for row in rows} <= keys


def test_what_the_page_of_table_1_says_is_what_the_rows_say():
    folder = ROOT / "primal_attention" / "table1_uea"
    rows = read_rows(folder / "results.csv")
    paper, clean = (
        means(rows, model="primalformer", protocol=protocol) for protocol in ("paper", "clean")
    )
    printed = tomllib.loads((folder / "expected.toml").read_text())
    column = printed["columns"].index("primalformer")
    first = {row["dataset"]: row["paper"][column] for row in printed["rows"]}
    told = told_by(folder)
    assert set(told) == set(paper)
    for name, (from_paper, _, ours, ours_clean) in told.items():
        assert from_paper == first[name]
        assert ours == round(paper[name], 1)
        assert ours_clean == round(clean[name], 1)


def test_what_the_page_of_table_6_says_is_what_the_rows_say():
    folder = ROOT / "primal_attention" / "table6_eta_s"
    printed, ours = {}, {}
    for row in tomllib.loads((folder / "expected.toml").read_text())["rows"]:
        printed.setdefault(row["dataset"], []).extend(row["paper"])
    for row in read_rows(folder / "results.csv"):
        ours.setdefault(row["dataset"], []).append(float(row["value"]))
    told = told_by(folder)
    assert set(told) == set(ours)
    for name, cells in told.items():
        both = printed[name], ours[name]
        expected = [kind(each) for kind in (statistics.mean, max) for each in both]
        assert cells == pytest.approx(expected, abs=0.0501)


def test_what_the_page_of_table_8_says_is_what_the_rows_say():
    folder = ROOT / "primal_attention" / "table8_projection"
    rows = read_rows(folder / "results.csv")
    static = means([row for row in rows if "weights=static" in row["settings"]])
    sampled = means([row for row in rows if "weights=static" not in row["settings"]])
    table = tomllib.loads((folder / "expected.toml").read_text())
    printed = {row["dataset"]: row["paper"] for row in table["rows"]}
    told = told_by(folder)
    assert set(told) == set(static) == set(sampled)
    for name, cells in told.items():
        expected = [printed[name][0], static[name], printed[name][1], sampled[name]]
        assert cells == pytest.approx(expected, abs=0.0501)


@pytest.mark.parametrize(("name", "seeds"), STUDIES)
def test_what_the_page_of_a_study_says_is_what_the_rows_say(name, seeds):
    folder = ROOT / "primal_attention" / name
    lines = re.findall(r"^\| `(.*)` \| ([\d.]+) \| ([\d.]+) \|$", read(folder), re.MULTILINE)
    told = sorted((float(valid), float(test)) for _, valid, test in lines)
    cells = {}
    for row in read_rows(folder / "results.csv"):
        if row["seed"] in seeds and "refit" not in row["settings"]:
            cells.setdefault(row["settings"], []).append((float(row["valid"]), float(row["value"])))
    complete = [values for values in cells.values() if len(values) == 5 * len(seeds)]
    means = [map(statistics.mean, zip(*values, strict=True)) for values in complete]
    assert told == sorted((float(f"{valid:.1f}"), float(f"{test:.1f}")) for valid, test in means)


def read(folder: Path) -> str:
    return (folder / "README.md").read_text()
