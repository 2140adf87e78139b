"""`primal bench`: time and memory of a layer, beside the least that is possible."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from primal_attention.benchmarking.plans import PRESETS, MeasurementPlan, plan_of, run_plan
from primal_attention.benchmarking.results import (
    CROSSOVER,
    Results,
    card_name,
    crossover_rows,
    read_rows,
    results_path,
    select,
)
from primal_attention.benchmarking.targets import Verdict, commits, verdicts
from primal_attention.cli.arguments import check_files, naming
from primal_attention.distributed.costs import LENGTHS, cost_table
from primal_attention.training.results import Row, current_commit

_SHOWN = {  # columns of the terminal, and how wide they are
    "mechanism": 14,
    "weights": 8,
    "causal": 6,
    "n": 8,
    "batch": 6,
    "pass": 8,
    "gpu_ms": 9,
    "wall_ms": 9,
    "peak_mib": 9,
    "compiled_gpu_ms": 16,
    "compiled_wall_ms": 17,
    "roofline_ms": 12,
    "copy_share": 11,
}
_MET = {True: "[green]met[/]", False: "[bold red]missed[/]"}


def bench(  # noqa: PLR0913 - each is an option of the command
    preset: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(PRESETS)}; default: headline on a GPU, else small."),
    ] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="What to time instead, e.g. primal, softmax-causal or flow."),
    ] = None,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Time these with torch.compile as well.")
    ] = False,
    tokens: Annotated[list[int] | None, typer.Option(help="Lengths N.")] = None,
    total: Annotated[list[int] | None, typer.Option(help="Tokens in a batch.")] = None,
    dim: Annotated[list[int] | None, typer.Option(help="Model dimension D.")] = None,
    heads: Annotated[list[int] | None, typer.Option(help="Heads H.")] = None,
    directions: Annotated[list[int] | None, typer.Option(help="Directions S.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16, float16, float32 or float64.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no measurement after so many.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for <card>_torch<version>_<date>.csv.")
    ] = None,
    results: Annotated[
        list[Path] | None, typer.Option(help="Check these files instead of measuring.")
    ] = None,
    distributed: Annotated[
        bool, typer.Option(help="Print messages and modelled times of sharded sequences.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Hold the rows against the targets.")
    ] = False,
) -> None:
    """Time layers, forward and backward; options for sizes can be given many times.

    With --check it exits with 1 where a target is missed.
    """
    console = Console(highlight=False, soft_wrap=True)
    if distributed:
        one = [
            (each or [default])[0] for each, default in ((dim, 512), (heads, 8), (directions, 32))
        ]
        with naming("--tokens, --dim, --heads or --directions"):
            for line in cost_table(tokens or LENGTHS, *one):
                console.print(line, markup=False)
        return
    with naming("--preset, --mechanism or a size"):
        chosen = preset or ("headline" if torch.cuda.is_available() else "small")
        sizes = {"lengths": tokens, "total": total, "dim": dim, "heads": heads}
        plan = plan_of(
            chosen,
            mechanism or (),
            compiled=compile_,
            **sizes,
            directions=directions,
            dtype=dtype,
        )
    if results:
        with naming("--results"):
            check_files(results)
            rows = [row for file in results for row in read_rows(file)]
    else:
        rows = _measured(console, plan, out, seconds)
    _show_crossovers(console, rows)
    if (check or results) and not _show_verdicts(console, rows):
        raise typer.Exit(1)


def _measured(
    console: Any, plan: MeasurementPlan, out: Path | None, seconds: float | None
) -> list[Row]:
    """Measure and return the rows, which are written and shown as they come."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with naming("--out"):
        results = Results(None if out is None else results_path(out, device))
    card, version = card_name(device), torch.__version__.split("+")[0]
    console.print(f"{card}, torch {version}, {len(list(plan.jobs()))} measurements")
    _show(console, {name: name for name in _SHOWN})
    run_plan(
        plan,
        results,
        commit=current_commit(),
        device=device,
        seconds=seconds,
        watch=partial(_show, console),
    )
    if results.path is not None:
        console.print(f"The rows are in {results.path}.")
    return results.rows


def _show(console: Any, row: Row) -> None:
    """Print a row; crossovers come at the end."""
    if row["mechanism"] == CROSSOVER:
        return
    cells = " ".join(f"{row.get(name, ''):>{width}}" for name, width in _SHOWN.items())
    console.print(f"{cells}  {row.get('note', '')}".rstrip(), markup=False)


def _show_crossovers(console: Any, rows: Sequence[Row]) -> None:
    known = select(rows, mechanism=CROSSOVER) or list(crossover_rows(rows))
    for row in known:
        form = f"{row['weights']}{', causal' if row['causal'] == 'True' else ''}, {row['pass']}"
        console.print(f"crossover ({form}): N = {row['n'] or 'none'}, {row['note']}", markup=False)


def _show_verdicts(console: Any, rows: Sequence[Row]) -> bool:
    """Print the verdicts and return whether no target is missed."""
    console.print("Targets for D=512, H=8, s=32; on a GPU bfloat16 and 65,536 tokens:")
    held = list(verdicts(rows))
    measured = [verdict for verdict in held if verdict.value is not None]
    for verdict in measured:
        console.print(_told(verdict))
    met = sum(verdict.met is True for verdict in measured)
    missed = len(measured) - met
    counts = f"{met} met, {missed} missed, {len(held) - len(measured)} not measured"
    console.print(f"{counts}; commits: {', '.join(commits(rows)) or 'none'}", markup=False)
    return not missed


def _told(verdict: Verdict) -> str:
    assert verdict.value is not None and verdict.met is not None
    bound = f"{'<=' if verdict.at_most else '>='} {_figures(verdict.target)}"
    value, met = _figures(verdict.value), _MET[verdict.met]
    return f"{verdict.what:<36} N={verdict.n:<8} {value:>9} {bound:>12}  {met}"


def _figures(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
