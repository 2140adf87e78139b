"""`primal report`: a page about trained runs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from primal_attention.analysis.report import write_report
from primal_attention.analysis.report.data import Track
from primal_attention.cli.arguments import naming


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    data: Annotated[
        Path | None, typer.Option(help="Folder of the data set; default: where it was.")
    ] = None,
    cases: Annotated[
        int, typer.Option(min=0, help="How many test cases to look into; 0: leave data alone.")
    ] = 64,
) -> None:
    """Write one HTML page about a run, or one that compares several."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with naming("RUN, --data or --out"), _bar(console) as track:
        write_report(runs, out, data=data, cases=cases, track=track)
    size = out.stat().st_size / 1e6
    what = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    console.print(f"{out}: {what}, {size:.1f} MB; open it in a browser", markup=False)


@contextmanager
def _bar(console: Any) -> Iterator[Track]:
    """Show a bar for each part of the work, or a line where there is no terminal."""
    with Progress(console=console, transient=True) as progress:

        def track(portions: Sequence[Tensor], what: str) -> Iterable[Tensor]:
            if not console.is_terminal:
                console.print(f"{what}, {len(portions)} batches", markup=False)
            return progress.track(portions, description=what)

        yield track
