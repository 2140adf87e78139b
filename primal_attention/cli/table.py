"""`primal table`: a table of the paper beside our runs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from primal_attention.atomic_files import csv_text, write_text
from primal_attention.cli.arguments import check_files, naming
from primal_attention.training import tables
from primal_attention.training.recipe import nearest
from primal_attention.training.results import Estimate, Row, read_rows

_SOURCES = {tables.PRINTED: "paper", "paper": "paper's protocol", "clean": "clean protocol"}


def table(
    name: Annotated[str, typer.Argument(help="For instance uea, table6 or table8_projection.")],
    folder: Annotated[
        Path, typer.Option(help="The reproduction suite, with the paper's numbers.")
    ] = Path("reproduction"),
    results: Annotated[
        list[Path] | None,
        typer.Option(help="Files of results; default: that of the table, else runs/."),
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Columns to show; default: those with runs.")
    ] = None,
    protocol: Annotated[
        list[str] | None, typer.Option(help="Protocols to show; default: all.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Show runs with this setting key=value instead."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write the table as CSV.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it as Markdown.")] = None,
) -> None:
    """Show the paper's numbers beside ours: mean, 95 % interval and number of seeds."""
    with naming("NAME or --folder"):
        path = tables.find_expected(name, folder)
        expected = tables.read_expected(path)
    with naming("--protocol"):
        expected = replace(expected, protocols=_protocols(expected, protocol))
    with naming("--results"):
        check_files(results or ())
        files = results or [_default_results(path.parent)]
        rows = [row for file in files for row in read_rows(file)]
    with naming("--column, --set or --results"):
        filled = tables.fill(expected, rows, columns=column or (), settings=set_ or ())
    console = Console(highlight=False)
    for columns in _side_by_side(filled, console.width):
        console.print(_rich_table(filled, columns))
    for note in _notes(filled, files, rows):
        console.print(note, markup=False, soft_wrap=True)
    for out, text in ((csv, _to_csv(filled)), (markdown, _to_markdown(filled, files, rows))):
        if out is not None:
            with naming("--csv or --markdown"):
                write_text(out, text)


def _protocols(expected: tables.Expected, chosen: Sequence[str] | None) -> tuple[str, ...]:
    for protocol in chosen or ():
        if protocol not in expected.protocols:
            hint = nearest(protocol, expected.protocols)
            raise ValueError(f"{expected.name} has no protocol {protocol!r}; {hint}")
    return tuple(chosen or expected.protocols)


def _default_results(folder: Path) -> Path:
    places = (folder / tables.RESULTS, Path("runs") / tables.RESULTS)
    return next((place for place in places if place.is_file()), places[0])


def _side_by_side(table: tables.Table, width: int) -> Iterator[list[str]]:
    """Split the columns into as many tables as it takes to fit the terminal."""
    widths = [_widest(texts) for texts in zip(*_grid(table, table.columns), strict=True)]
    num_keys, num_sources = len(_key_names(table)), len(table.sources)
    room = width - sum(widths[:num_keys]) - 1
    left, columns = room, list[str]()
    for index, column in enumerate(table.columns):
        first = num_keys + index * num_sources
        needed = sum(widths[first : first + num_sources])
        if columns and needed > left:
            yield columns
            left, columns = room, []
        columns.append(column)
        left -= needed
    yield columns


def _widest(texts: Sequence[str]) -> int:
    """Return the width of the widest line of some cells, with a frame on one side."""
    return max(len(line) for text in texts for line in text.split("\n")) + 3


def _grid(table: tables.Table, columns: Sequence[str], separator: str = "\n") -> list[list[str]]:
    """Format headings, rows and averages, each with its keys first."""
    names = _key_names(table)
    wheres = [(column, source) for column in columns for source in table.sources]
    headings = [
        f"{table.heading(column)}{separator}{_SOURCES[source]}" for column, source in wheres
    ]
    rows = [
        [value for _, value in key] + [_text(table.value(key, *where)) for where in wheres]
        for key in table.expected.keys
    ]
    averages = [_text(table.average(*where)) for where in wheres]
    return [names + headings, *rows, ["average", *[""] * (len(names) - 1), *averages]]


def _rich_table(table: tables.Table, columns: Sequence[str]) -> Any:
    shown = RichTable(title=table.expected.title, title_justify="left", padding=(0, 1))
    headings, *rows, averages = _grid(table, columns)
    for index, heading in enumerate(headings):
        is_key = index < len(_key_names(table))
        shown.add_column(heading, justify="left" if is_key else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    shown.add_section()
    shown.add_row(*averages)
    return shown


def _key_names(table: tables.Table) -> list[str]:
    return [name.removeprefix("attention.") for name, _ in table.expected.keys[0]]


def _text(value: float | Estimate | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, Estimate) else f"{value:.1f}"


def _notes(table: tables.Table, files: Sequence[Path], rows: Sequence[Row]) -> list[str]:
    """Write the notes: sources, what is averaged, what is not shown."""
    common = [" ".join(value for _, value in key) for key in table.common_keys()]
    on_test = any("test" in row["selection"] for row in rows)
    notes = [
        f"Ours: mean ± 95 % interval of Student's t (number of seeds), from {len(rows)} runs in "
        f"{', '.join(map(str, files))}."
        + (" The paper's protocol selects on the test cases." if on_test else ""),
        f"Averages are over what every column has: {', '.join(common) or 'nothing'}.",
    ]
    schedules = tables.other_schedules(table)
    if schedules:
        notes.append(f"Schedules that are not the paper's: {', '.join(schedules)}.")
    hidden = [table.heading(each) for each in table.expected.headings if each not in table.columns]
    if hidden:
        notes.append(f"Columns without runs are not shown: {', '.join(hidden)}.")
    if table.left_out:
        reasons = Counter(tables.why_left_out(table.expected, row) for row in table.left_out)
        told = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        notes.append(f"{len(table.left_out)} runs that are not of the table are left out: {told}.")
    return notes


def _to_csv(table: tables.Table) -> str:
    """Write one line a cell: its key, the paper's number, ours by protocol."""
    expected = table.expected
    rows = [
        {**dict(key), expected.column: column, **_numbers(table, key, column)}
        for key in expected.keys
        for column in table.columns
    ]
    numbers = [f"{p}_{what}" for p in expected.protocols for what in ("mean", "margin", "seeds")]
    keys = [name for name, _ in expected.keys[0]]
    return csv_text([*keys, expected.column, "printed", *numbers], rows)


def _numbers(table: tables.Table, key: tables.Key, column: str) -> dict[str, object]:
    """Format the numbers of a cell by their columns, without those that there are not."""
    numbers: dict[str, object] = {"printed": table.value(key, column, tables.PRINTED)}
    for protocol in table.expected.protocols:
        ours = table.value(key, column, protocol)
        if isinstance(ours, Estimate):
            numbers[f"{protocol}_mean"] = f"{ours.mean:.4f}"
            numbers[f"{protocol}_margin"] = "" if ours.margin is None else f"{ours.margin:.4f}"
            numbers[f"{protocol}_seeds"] = ours.seeds
    return numbers


def _to_markdown(table: tables.Table, files: Sequence[Path], rows: Sequence[Row]) -> str:
    headings, *body = _grid(table, table.columns, ", ")
    num_keys = len(_key_names(table))
    rule = ["---"] * num_keys + ["--:"] * (len(headings) - num_keys)
    lines = [headings, rule, *body]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = "\n\n".join(_notes(table, files, rows))
    return f"**{table.expected.title}**\n\n{text}\n\n{notes}\n"
