"""A report of finished runs: one HTML page that needs nothing beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from primal_attention.analysis.report.data import FinishedRun, Track, examine, read_run
from primal_attention.analysis.report.figures import drawing
from primal_attention.analysis.report.page import render
from primal_attention.analysis.report.sections import ReportedRun, chapter_of, comparison, names_of
from primal_attention.atomic_files import write_text
from primal_attention.training.tables import printed_in

__all__ = ["write_report"]


def _untracked(portions: Sequence[Tensor], what: str) -> Iterable[Tensor]:
    return portions


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    data: Path | None = None,
    cases: int = 64,
    suite: Path = Path("reproduction"),
    track: Track = _untracked,
) -> None:
    """Write the page of one run, or of several that are compared, in one step.

    Args:
        directories: Directories of finished runs.
        out: The file.
        data: Folder of the data; None: where the task finds them. If they are not found, the page
            says so.
        cases: Test cases whose attention is analysed; 0 leaves out all that needs data.
        suite: Folder with the paper's tables.
        track: Is given the batches of all work that takes time.
    """
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"out must be a file in a folder that exists, got {out}")
    if cases < 0:
        raise ValueError(f"cases must not be negative, got {cases}")
    if data is not None and not data.is_dir():
        raise ValueError(f"data must be a folder that exists, got {data}")
    if not directories:
        raise ValueError("directories must name at least one run, got none")
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"directories must differ, got {directory} twice")
    runs = [read_run(directory) for directory in directories]  # before any work that takes long

    def reported(name: str, run: FinishedRun) -> ReportedRun:
        findings = examine(run, data, cases, lambda some, what: track(some, f"{name}: {what}"))
        return ReportedRun(name, run, findings, printed_in(suite, run.recipe))

    with drawing():
        every = [reported(name, run) for name, run in zip(names_of(runs), runs, strict=True)]
        chapters = [chapter_of(each, f"run{number}") for number, each in enumerate(every, 1)]
        if len(every) > 1:
            chapters.insert(0, comparison(every))
    recipe = runs[0].recipe
    title = f"{recipe.task}, {recipe.model.name}"
    subtitle = f"{recipe.run.protocol} protocol, seed {recipe.run.seed}"
    if len(runs) > 1:
        title = ", ".join(dict.fromkeys(run.recipe.task for run in runs))
        subtitle = f"{len(runs)} runs"
    write_text(out, render(title, subtitle, chapters))
