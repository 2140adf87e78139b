"""Tables: what a paper printed beside what came of our runs.

A folder of the reproduction suite has ``expected.toml``, the paper's numbers and what the rows and
columns stand for, and ``results.csv``, our runs. A run counts in a cell if its settings are those
of the named recipe with the settings of the cell; nothing else is mixed in.
"""

import itertools
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from primal_attention.attention import options_of
from primal_attention.models.stacks import MODELS, mechanism_of
from primal_attention.training.domains import find_recipe
from primal_attention.training.recipe import Recipe, nearest
from primal_attention.training.results import KEY, Estimate, Row, average, estimate, settings_of

EXPECTED, RESULTS = "expected.toml", "results.csv"
PRINTED = "printed"  # the paper's own number, beside the protocols
_SAME_MODEL = ("precision", "graph", "compile")  # settings of how the same thing is computed

Key = tuple[tuple[str, str], ...]
"""Key of a row of a table: pairs such as ("dataset", "Heartbeat")."""


@dataclass(frozen=True)
class Expected:
    """A table of a paper, and what it takes to find the runs of its cells."""

    name: str
    title: str
    domain: str
    metric: str
    protocols: Sequence[str]
    column: str  # what the columns differ in: model, or a setting
    headings: Mapping[str, str]  # of each value of it
    keys: tuple[Key, ...]  # what the rows stand for, in order
    printed: Mapping[tuple[Key, str], float]  # of rows that the paper has
    model: str | None = None  # of all cells, where the columns are not models
    free: Collection[str] = ()  # settings in which a cell may differ from the recipe
    selection: str | None = None  # of the checkpoint, where a run has rows for several


def read_expected(path: Path) -> Expected:
    """Read the table of an ``expected.toml``."""
    try:
        values = tomllib.loads(path.read_text())
        columns = [str(value) for value in values.pop("columns")]
        keys = list[Key]()
        printed: dict[tuple[Key, str], float] = {}
        for row in values.pop("rows"):
            numbers = row.pop("paper", None)
            keys.append(tuple((name, str(value)) for name, value in row.items()))
            if numbers is not None:
                printed |= {(keys[-1], each): n for each, n in zip(columns, numbers, strict=True)}
        values["headings"] = dict(zip(columns, values["headings"], strict=True))
        values |= {"name": path.parent.name, "keys": tuple(keys), "printed": printed}
        return Expected(**{e.name: values[e.name] for e in fields(Expected) if e.name in values})
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a table of expected numbers: {error!r}") from error


def find_expected(name: str, folder: Path) -> Path:
    """Find the ``expected.toml`` of a table, named as its folder is, or as a part of that.

    ``table1_uea`` answers to ``table1`` and ``uea`` too.
    """
    paths = sorted(folder.glob(f"**/{EXPECTED}"))
    if not paths:
        raise FileNotFoundError(
            f"no table is in the folder {folder}; give the folder reproduction of a copy of the "
            "repository"
        )
    names = {path.parent.name: path for path in paths}
    for full, path in names.items():
        number, _, subject = full.partition("_")
        if name in (full, number, subject):
            return path
    raise ValueError(f"no table is called {name!r}; {nearest(name, names)}")


@dataclass(frozen=True)
class Table:
    """A filled table."""

    expected: Expected
    columns: tuple[str, ...]
    numbers: Mapping[tuple[Key, str, str], float | Estimate]  # of a row, a column and a source
    counted: tuple[Row, ...]  # runs that are in a cell
    left_out: tuple[Row, ...]  # runs under its protocols that belong to no cell

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of the numbers of each column."""
        return (PRINTED, *self.expected.protocols)

    def heading(self, column: str) -> str:
        """Return the paper's name of a column, else our own."""
        return self.expected.headings.get(column, column)

    def value(self, key: Key, column: str, source: str) -> float | Estimate | None:
        """Return the number of a cell."""
        return self.numbers.get((key, column, source))

    def common_keys(self) -> tuple[Key, ...]:
        """Return the rows with a number in every filled column: averages over them are fair."""
        keys = self.expected.keys
        wheres = [(column, source) for column in self.columns for source in self.sources]
        filled = [
            where for where in wheres if any(self.value(key, *where) is not None for key in keys)
        ]
        return tuple(
            key for key in keys if all(self.value(key, *where) is not None for where in filled)
        )

    def average(self, column: str, source: str) -> float | Estimate | None:
        """Average a column over the common rows."""
        values = [self.value(key, column, source) for key in self.common_keys()]
        ours = [value for value in values if isinstance(value, Estimate)]
        numbers = [value for value in values if isinstance(value, float)]
        if not values or len(ours) + len(numbers) < len(values):
            return None
        return average(ours) if ours else sum(numbers) / len(numbers)


def fill(
    expected: Expected,
    rows: Iterable[Row],
    *,
    columns: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Table:
    """Fill a table with our runs.

    Args:
        expected: What the paper printed.
        rows: Of results files; of two rows of the same run the later one counts.
        columns: Those to show; by default all that have a run, or else all of the paper.
        settings: ``key=value`` changes to the recipes: shows runs that have them instead.
    """
    counting = [row for row in rows if expected.selection in (None, row["selection"])]
    runs = list({tuple(row[name] for name in KEY): row for row in counting}.values())
    ours = {row["model"] for row in runs} if expected.column == "model" else set()
    known = list(dict.fromkeys([*expected.headings, *(each for each in MODELS if each in ours)]))
    for column in columns:
        if column not in known:
            raise ValueError(f"no column is called {column!r}; {nearest(column, known)}")
    numbers: dict[tuple[Key, str, str], float | Estimate] = {
        (*cell, PRINTED): number for cell, number in expected.printed.items()
    }
    used, filled = set(), set()
    for place in itertools.product(expected.keys, known, expected.protocols):
        found = _runs_of(expected, runs, place, settings)
        if found:
            numbers[place] = estimate([float(row["value"]) for row in found])
            used |= {id(row) for row in found}
            filled.add(place[1])
    shown = tuple(columns) or tuple(column for column in known if column in filled)
    of_protocols = [row for row in runs if row["protocol"] in expected.protocols]
    counted = tuple(row for row in of_protocols if id(row) in used)
    left_out = tuple(row for row in of_protocols if id(row) not in used)
    return Table(expected, shown or tuple(expected.headings), numbers, counted, left_out)


def printed_in(suite: Path, recipe: Recipe) -> tuple[float, str] | None:
    """Return the paper's number and the name of its table, where a folder of the suite has it.

    Tables whose columns are no models, and those of what training does not measure, do not count.
    """
    cell = (("dataset", recipe.set_name),), recipe.model.name
    for path in sorted(suite.glob(f"**/{EXPECTED}")):
        expected = read_expected(path)
        of_training = (expected.domain, expected.column, expected.selection)
        if of_training == (recipe.domain, "model", None) and cell in expected.printed:
            return expected.printed[cell], expected.title.partition(":")[0]
    return None


def other_schedules(table: Table) -> list[str]:
    """List the schedules that differ from the recipe's: "8750 of 35000 steps (image)"."""
    found: dict[str, dict[str, None]] = {}
    for row in table.counted:
        task, model = f"{table.expected.domain}/{row['dataset']}", row["model"]
        recipe, plain = find_recipe(task, model, row["protocol"]), Recipe(task, model)
        unit = f"{recipe.optim.unit}s"
        ran = _as_dict(row["settings"], model).get(unit, str(getattr(plain.optim, unit)))
        whole = str(getattr(recipe.optim, unit))
        if ran != whole:
            found.setdefault(f"{ran} of {whole} {unit}", {})[row["dataset"]] = None
    return [f"{schedule} ({', '.join(names)})" for schedule, names in found.items()]


def _runs_of(
    expected: Expected,
    runs: Sequence[Row],
    place: tuple[Key, str, str],
    settings: Sequence[str],
) -> list[Row]:
    """Find the runs of a cell under a protocol, one a seed, all computed in the same way.

    Which way may be any, unless it is what is timed.
    """
    key, column, protocol = place
    values = dict(key) | {expected.column: column}
    dataset, model = values.pop("dataset"), values.pop("model", expected.model) or ""
    changes = [*(f"{name}={value}" for name, value in values.items()), *settings]
    recipe = find_recipe(f"{expected.domain}/{dataset}", model, protocol).with_settings(changes)
    chosen = {setting.partition("=")[0] for setting in settings}
    same = () if expected.metric == "seconds" else _SAME_MODEL
    ignored = {*same, *expected.free} - chosen
    wanted = _as_dict(settings_of(recipe), model, ignored)
    found = [
        row
        for row in runs
        if (row["dataset"], row["model"], row["protocol"]) == (dataset, model, protocol)
        and _as_dict(row["settings"], model, ignored) == wanted
    ]
    for row in found:
        if row["metric"] != expected.metric:
            raise ValueError(
                f"{dataset}, {model}: metric {row['metric']!r}, the table has {expected.metric!r}"
            )
    _check_alike(f"{dataset}, {model}, {protocol}", found)
    return found


def _check_alike(place: str, runs: Sequence[Row]) -> None:
    """Runs of one cell differ in nothing but the seed."""
    kinds = sorted({row["settings"] for row in runs})
    if len(kinds) > 1:
        texts = [set(kind.split()) for kind in kinds]
        shared = texts[0].intersection(*texts[1:])
        differing = [" ".join(sorted(text - shared)) or "the defaults" for text in texts]
        raise ValueError(
            f"{place}: there are runs with different settings ({'; '.join(differing)}); "
            "choose with --set, for instance --set precision=fp32"
        )


def _as_dict(settings: str, model: str, ignored: Collection[str] = ()) -> dict[str, str]:
    """Settings by name, without those ignored and without defaults of the mechanism."""
    defaults = _defaults(model)
    pairs = (setting.partition("=")[::2] for setting in settings.split())
    return {
        name: value for name, value in pairs if name not in ignored and defaults.get(name) != value
    }


@cache
def _defaults(model: str) -> dict[str, str]:
    """Return the options of a model's mechanism as settings."""
    parameters = options_of(mechanism_of(model))
    return {f"attention.{name}": str(each.default) for name, each in parameters.items()}
