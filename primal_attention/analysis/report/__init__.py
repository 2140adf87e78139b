"""A report of trained runs: one HTML page that needs nothing beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from primal_attention.analysis.report.comparison import comparison, names_of
from primal_attention.analysis.report.html import Chapter, Html, page, paragraph
from primal_attention.analysis.report.looks import Track, look
from primal_attention.analysis.report.run import Run, printed, read_run
from primal_attention.analysis.report.sections import Subject, headline, sections
from primal_attention.atomic_files import write_text

__all__ = ["report_page", "write_report"]


def _untold(portions: Sequence[Tensor], what: str) -> Iterable[Tensor]:
    return portions


def write_report(
    directories: Sequence[Path],
    out: Path,
    *,
    data: Path | None = None,
    cases: int = 64,
    suite: Path = Path("reproduction"),
    track: Track = _untold,
) -> None:
    """Write the page of one run, or of several that are compared, in one step.

    Args:
        directories: Of runs that are over.
        out: The file.
        data: Folder of the data; None: where the task finds them. Where they are not at hand the
            page says so.
        cases: Test cases whose attention is looked into; 0 leaves out all that needs data.
        suite: Folder with the paper's tables.
        track: Is handed the batches of all work that takes time.
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
    track: Track = _untold,
) -> str:
    """The page as text; arguments as of ``write_report``."""
    if cases < 0:
        raise ValueError(f"cases must not be negative, got {cases}")
    if data is not None and not data.is_dir():
        raise ValueError(f"data must be a folder that exists, got {data}")
    runs = _read(directories)
    names = names_of(runs)
    subjects = [
        Subject(name, run, look(run, data, cases, _named(track, name)), printed(run.recipe, suite))
        for name, run in zip(names, runs, strict=True)
    ]
    return _page_of_one(subjects[0]) if len(subjects) == 1 else _page_of_many(subjects)


def _read(directories: Sequence[Path]) -> list[Run]:
    """All runs, before any work that takes long."""
    if not directories:
        raise ValueError("directories must name at least one run, got none")
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if places.count(place) > 1:
            raise ValueError(f"directories must differ, got {directory} twice")
    return [read_run(directory) for directory in directories]


def _named(track: Track, name: str) -> Track:
    return lambda portions, what: track(portions, f"{name}: {what}")


def _page_of_one(subject: Subject) -> str:
    recipe = subject.run.recipe
    chapter = Chapter("run", subject.name, list(sections(subject, "")))
    title = f"{recipe.task}, {recipe.model}"
    subtitle = f"{recipe.protocol} protocol, seed {recipe.seed}"
    return page(title, subtitle, headline(subject), [chapter])


def _page_of_many(subjects: Sequence[Subject]) -> str:
    chapters = [Chapter("comparison", "Comparison", list(comparison(subjects)))]
    for number, each in enumerate(subjects, 1):
        anchor = f"run{number}"
        chapters.append(Chapter(anchor, each.name, list(sections(each, f"{anchor}-"))))
    tasks = ", ".join(dict.fromkeys(each.run.recipe.task for each in subjects))
    introduction: Html = paragraph("First all runs together, then each by itself.")
    return page(tasks, f"{len(subjects)} runs", introduction, chapters)
