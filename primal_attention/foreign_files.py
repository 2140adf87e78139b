"""Read files that anyone may have written: errors are one line that names the file."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 300  # characters of a reason
REMEDY = "take a copy of it, or remove it and run what wrote it again"


class UnreadableFileError(ValueError):
    """A file is damaged, foreign or does not fit; the message names it and says what to do."""


@contextmanager
def reading(path: Path | str, kind: str, remedy: str) -> Iterator[None]:
    """Turn every error of parsing into an ``UnreadableFileError`` that names the file.

    Parsers fail on foreign bytes in ways of their own (EOFError, MemoryError, struct.error, ...),
    so every exception is caught, except an OSError that names a file already.

    Args:
        path: The file or folder that is read.
        kind: Follows ``is not``: what the file should be.
        remedy: What to do about it.
    """
    try:
        yield
    except (ModuleNotFoundError, UnreadableFileError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        told = f"{path} is not {kind} ({reason(error)}); {remedy}"
        raise UnreadableFileError(told) from error


def reason(error: Exception) -> str:
    """Return the message of an exception in one printable line of bounded length."""
    words = " ".join(str(error).split())
    if not isinstance(error, (ValueError, OSError)) or not words:
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in words[:_LONGEST])
    return shown if len(words) <= _LONGEST else shown + "..."


def file_size(path: Path) -> int:
    """Return the bytes of a regular file; refuse pipes and devices, which have no end."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{path} is a folder; give a file")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is a device or a pipe; give a regular file")
    return found.st_size


def read_bytes(path: Path, most: int) -> bytes:
    """Read a file that may have at most so many bytes."""
    if (size := file_size(path)) > most:
        raise ValueError(
            f"{path} has {size} bytes, and at most {most} are expected; is it another file?"
        )
    return path.read_bytes()


def read_text(path: Path, most: int) -> str:
    """Read a text in UTF-8 of at most so many bytes."""
    with reading(path, "a text in UTF-8", "get the whole file anew"):
        return read_bytes(path, most).decode("utf-8-sig")


def is_plain_name(name: str) -> bool:
    """Tell whether a name that stands in a file stays in the folder that it is looked up in."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
