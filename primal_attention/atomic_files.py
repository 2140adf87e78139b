"""Write files whole or not at all, and lock paths that only one process may write to.

A lock belongs to its process: the system releases it when the process ends, however that happens.
"""

import csv
import hashlib
import io
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from primal_attention.foreign_files import REMEDY, reading

try:
    import fcntl
except ImportError:  # a system without file locks
    fcntl = None  # type: ignore[assignment]

_POLL = 0.01  # seconds between two tries of a lock


class WriteError(OSError):
    """A file or folder cannot be written, for instance on a full disk; the message names it."""


class HeldError(OSError):
    """Another process holds what this one would write to; the message says which."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces the path once it is complete and on the disk.

    If writing fails, the error names the path and the earlier file remains.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with writing_to(path):
            yield temporary
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing_to(path: Path, *files: Path) -> Iterator[None]:
    """Name the path in errors of writing that name no file, a temporary one, or one of these."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        name = None if error.filename is None else str(error.filename)
        if name is not None and name not in map(str, files) and not name.endswith(".unfinished"):
            raise
        reason = error.strerror or " ".join(str(error).split())
        told = WriteError(f"cannot write {path}: {reason}; free space or choose another place")
        told.errno = error.errno
        raise told from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write a csv file in one step; a row that lacks a column has an empty cell."""
    columns = dict.fromkeys(name for row in rows for name in row)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, csv_text(columns, rows))


def csv_text(columns: Iterable[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Format rows as csv; one that lacks a column has an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def remove_unfinished(directory: Path) -> None:
    """Remove the temporary files of killed writers; call it where no other process writes."""
    for left in directory.glob(".*.unfinished"):
        left.unlink(missing_ok=True)


def fitting(path: Path, what: str) -> AbstractContextManager[None]:
    """Name a file or folder whose content does not fit; see ``reading``."""
    return reading(path, what, REMEDY)


@contextmanager
def holding(path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Lock a file or folder against other processes that ask for it.

    Args:
        path: The file or folder. A file need not exist; its folder must.
        wait: Seconds to wait for another process.

    Raises:
        HeldError: Another process holds it.
    """
    if fcntl is None:
        yield
        return
    lock = path / ".lock" if path.is_dir() else path.with_name(f".{path.name}.lock")
    until = time.monotonic() + wait
    while (file := _locked(lock)) is None:
        if time.monotonic() >= until:
            raise HeldError(
                f"{path} is held by {_holder(lock)}, which writes to it; wait for its end "
                "or choose another place"
            )
        time.sleep(_POLL)
    try:
        with suppress(OSError):  # a full disk leaves the name out
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(file)


def _locked(lock: Path) -> int | None:
    """Create, open and lock a file; None if another process holds it."""
    while True:
        try:
            file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            told = f"cannot write in {lock.parent}: {error.strerror}; choose another place"
            raise type(error)(told) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        except OSError:
            pass  # a file system without locks
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            if os.path.samestat(os.fstat(file), lock.stat()):
                return file
        os.close(file)


def _holder(lock: Path) -> str:
    with suppress(OSError):
        return lock.read_text(errors="replace") or "another process"
    return "another process"


def checksum_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
