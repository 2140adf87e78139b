"""The numbers of a table, the paper's and ours, for its page on the site."""

from __future__ import annotations

from pathlib import Path

from primal_attention.training.results import Estimate, read_rows
from primal_attention.training.tables import (
    EXPECTED,
    PRINTED,
    RESULTS,
    Table,
    fill,
    other_schedules,
    read_expected,
)

SOURCES = {
    PRINTED: "The paper",
    "paper": "Ours under the paper's protocol",
    "clean": "Ours under the clean protocol",
}
NOTE = """\
Ours: mean ± 95 % interval of Student's t (number of seeds), over the runs with the settings of the
named recipes."""


def filled_table(folder: Path) -> str:
    """A section in Markdown; empty where the folder holds no table."""
    if not (folder / EXPECTED).exists():
        return ""
    expected, rows = read_expected(folder / EXPECTED), read_rows(folder / RESULTS)
    columns = [*expected.headings, *fill(expected, rows).columns]
    table = fill(expected, rows, columns=list(dict.fromkeys(columns)))
    parts = [grid(table, source) for source in table.sources]
    title = expected.title.partition(": ")[2]
    schedules = other_schedules(table)
    note = (
        f"{NOTE} Schedules that are not the paper's: {', '.join(schedules)}." if schedules else NOTE
    )
    return "\n\n".join([f"\n\n## The numbers: {title}", *filter(None, parts), note]) + "\n"


def grid(table: Table, source: str) -> str:
    """The numbers of one source; only the rows and columns that have any."""
    keys = [key for key in table.expected.keys if any(cells(table, key, source).values())]
    columns = [c for c in table.columns if any(cells(table, key, source)[c] for key in keys)]
    if not columns:
        return ""
    names = [name.removeprefix("attention.") for name, _ in keys[0]]
    lines = [[*names, *(table.heading(column) for column in columns)]]
    lines += [["---"] * len(names) + ["--:"] * len(columns)]
    lines += [[value for _, value in key] + texts(table, key, source, columns) for key in keys]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"### {SOURCES[source]}\n\n{body}"


def cells(table: Table, key: tuple, source: str) -> dict[str, str]:
    """The text of each column of a row; empty where there is no number."""
    values = {column: table.value(key, column, source) for column in table.columns}
    return {column: text_of(value) for column, value in values.items()}


def texts(table: Table, key: tuple, source: str, columns: list[str]) -> list[str]:
    """Return the texts of some of the columns."""
    return [cells(table, key, source)[column] for column in columns]


def text_of(value: float | Estimate | None) -> str:
    """A number as tables print it."""
    if value is None:
        return ""
    return str(value) if isinstance(value, Estimate) else f"{value:.1f}"
