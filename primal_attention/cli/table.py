"""`primal table`: a table of the paper beside our runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from primal_attention.cli.arguments import check_files, naming
from primal_attention.training import tables
from primal_attention.training.recipe import nearest
from primal_attention.training.results import Estimate, Row, read_rows

_SOURCES = {tables.PRINTED: "paper", "paper": "paper's protocol", "clean": "clean protocol"}
_WIDTH = 18  # of a column of numbers, about


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
    together = max(1, (console.width - _WIDTH) // (_WIDTH * len(filled.sources)))
    for start in range(0, len(filled.columns), together):
        console.print(_rich_table(filled, filled.columns[start : start + together]))
    for note in _notes(filled, files, rows):
        console.print(note, markup=False, soft_wrap=True)


def _protocols(expected: tables.Expected, chosen: Sequence[str] | None) -> tuple[str, ...]:
    for protocol in chosen or ():
        if protocol not in expected.protocols:
            hint = nearest(protocol, expected.protocols)
            raise ValueError(f"{expected.name} has no protocol {protocol!r}; {hint}")
    return tuple(chosen or expected.protocols)


def _default_results(folder: Path) -> Path:
    places = (folder / tables.RESULTS, Path("runs") / tables.RESULTS)
    return next((place for place in places if place.is_file()), places[0])


def _rich_table(table: tables.Table, columns: Sequence[str]) -> Any:
    """Lay out rows and averages, each with its keys first, and three sources a column."""
    shown = RichTable(title=table.expected.title, title_justify="left", padding=(0, 1))
    names = [name.removeprefix("attention.") for name, _ in table.expected.keys[0]]
    wheres = [(column, source) for column in columns for source in table.sources]
    for name in names:
        shown.add_column(name, no_wrap=True)
    for column, source in wheres:
        heading = f"{table.heading(column)}\n{_SOURCES[source]}"
        shown.add_column(heading, justify="right", no_wrap=True)
    for key in table.expected.keys:
        numbers = [_text(table.value(key, *where)) for where in wheres]
        shown.add_row(*(value for _, value in key), *numbers)
    shown.add_section()
    averages = [_text(table.average(*where)) for where in wheres]
    shown.add_row("average", *[""] * (len(names) - 1), *averages)
    return shown


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
        others = dict.fromkeys(row["settings"] for row in table.left_out)
        told = "; ".join(list(others)[:3])
        notes.append(f"{len(table.left_out)} runs that are not of the table are left out: {told}.")
    return notes
