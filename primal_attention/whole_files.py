"""Files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside a path that takes its place once it is whole and on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with writing(path):
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name a file or folder in what keeps it from being written, such as a full disk."""
    try:
        yield
    except OSError as error:
        named = error.filename is not None and not str(error.filename).endswith(".unfinished")
        if named:
            raise
        reason = error.strerror or " ".join(str(error).split())
        message = f"{path} could not be written ({reason}); make room, or write elsewhere"
        raise (OSError(error.errno, message) if error.errno else OSError(message)) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a csv file in one step; a row that lacks a column has an empty cell."""
    columns = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def remove_unfinished(directory: Path) -> None:
    """Remove what writers left behind that were killed."""
    for left in directory.glob(".*.unfinished"):
        left.unlink(missing_ok=True)
