"""A report of finished runs: one HTML page that needs nothing beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from primal_attention.analysis.report.data import FinishedRun, Track, examine, read_run
from primal_attention.analysis.report.html import Chapter, page
from primal_attention.analysis.report.sections import (
    ReportedRun,
    comparison,
    headline,
    names_of,
    sections,
)
from primal_attention.atomic_files import write_text
from primal_attention.training.tables import printed_in

__all__ = ["report_page", "write_report"]


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
    text = report_page(directories, data=data, cases=cases, suite=suite, track=track)
    write_text(out, text)


def report_page(
    directories: Sequence[Path],
    *,
    data: Path | None = None,
    cases: int = 64,
    suite: Path = Path("reproduction"),
    track: Track = _untracked,
) -> str:
    """Return the page as text; arguments as of ``write_report``."""
    if cases < 0:
        raise ValueError(f"cases must not be negative, got {cases}")
    if data is not None and not data.is_dir():
        raise ValueError(f"data must be a folder that exists, got {data}")
    runs = _read(directories)  # all of them before any work that takes long
    reported = []
    for name, run in zip(names_of(runs), runs, strict=True):
        findings = examine(run, data, cases, _named(track, name))
        reported.append(ReportedRun(name, run, findings, printed_in(suite, run.recipe)))
    return _page_of_one(reported[0]) if len(reported) == 1 else _page_of_many(reported)


def _read(directories: Sequence[Path]) -> list[FinishedRun]:
    if not directories:
        raise ValueError("directories must name at least one run, got none")
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"directories must differ, got {directory} twice")
    return [read_run(directory) for directory in directories]


def _named(track: Track, name: str) -> Track:
    return lambda portions, what: track(portions, f"{name}: {what}")


def _page_of_one(reported: ReportedRun) -> str:
    recipe = reported.run.recipe
    chapter = Chapter("run", reported.name, list(sections(reported, "")))
    title = f"{recipe.task}, {recipe.model.name}"
    subtitle = f"{recipe.run.protocol} protocol, seed {recipe.run.seed}"
    return page(title, subtitle, headline(reported), [chapter])


def _page_of_many(reported: Sequence[ReportedRun]) -> str:
    chapters = [Chapter("comparison", "Comparison", list(comparison(reported)))]
    for number, each in enumerate(reported, 1):
        anchor = f"run{number}"
        chapters.append(Chapter(anchor, each.name, list(sections(each, f"{anchor}-"))))
    tasks = ", ".join(dict.fromkeys(each.run.recipe.task for each in reported))
    introduction = ["First all runs together, then each by itself."]
    return page(tasks, f"{len(reported)} runs", introduction, chapters)
