"""Data sets on disk: a prepared ``<name>.npz``, or else the files as they are handed out."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import ArrayFile, open_arrays, write_arrays
from primal_attention.foreign_files import reading

Found = TypeVar("Found")


class PreparedSets(ABC, Generic[Found]):
    """The data sets of one domain: finds, reads, writes and prepares them.

    A set is looked for in a folder that is given, or else in ``<domain>`` in the folder that the
    environment variable ``PRIMAL_DATA`` names (``data`` where it is not set), then in the folder
    around it. A prepared file comes first.
    """

    domain: ClassVar[str]  # the folder of its sets
    names: ClassVar[tuple[str, ...]] = ()  # all there are, where a domain has no others
    noun: ClassVar[str] = ""  # what such a name is of
    format: ClassVar[str]  # of prepared files
    kind: ClassVar[str]  # what a prepared file is, and how to write it anew, of a {name}
    remedy: ClassVar[str]
    compressed: ClassVar[bool] = False
    looks_around: ClassVar[bool] = True  # whether the folder around the domain's is searched

    def load(self, name: str, folder: Path | None = None) -> Found:
        """Read a set from its prepared file, or else from its files.

        Args:
            name: Of the set.
            folder: Where to look first and only; by default the folder of the domain.
        """
        place = self.find(name, folder)
        if place is None:
            return self._fetch(name, folder)
        if place.name == f"{name}.npz":
            return self.read(place, name)
        return self._read_files(name, place)

    def find(self, name: str, folder: Path | None = None) -> Path | None:
        """Return the file or folder that a set would be loaded from, None if it is not there."""
        self._check_name(name)
        prepared = (each / f"{name}.npz" for each in self.folders(folder))
        return next((path for path in prepared if path.is_file()), self._find_files(name, folder))

    def prepare(self, name: str, folder: Path | None = None, out: Path | None = None) -> Path:
        """Write a set to ``<out>/<name>.npz``, which loads fast and without any other package.

        Args:
            name: Of the set.
            folder: Where its files are; a prepared file there is not read.
            out: Where to write; the folder by default.
        """
        self._check_name(name)
        place = self._find_files(name, folder)
        found = self._fetch(name, folder) if place is None else self._read_files(name, place)
        path = self.target(name, folder, out)
        self.write(path, found)
        return path

    def folders(self, folder: Path | None = None) -> list[Path]:
        """List where to look; prepared files are written to the first."""
        if folder is not None:
            return [Path(folder)]
        data = Path(os.environ.get("PRIMAL_DATA", "data"))
        return [data / self.domain, data] if self.looks_around else [data / self.domain]

    def target(self, name: str, folder: Path | None, out: Path | None) -> Path:
        """Return where the prepared file of a set is written."""
        return (self.folders(folder)[0] if out is None else Path(out)) / f"{name}.npz"

    def write(self, path: Path, found: Found) -> None:
        """Write a prepared file, which is there whole or not at all."""
        arrays = {"format": np.array(self.format), **self._pack(found)}
        write_arrays(path, arrays, compressed=self.compressed)

    def read(self, path: Path, name: str | None = None) -> Found:
        """Read a prepared file.

        Raises:
            ValueError: Naming the file, what is wrong with it and what to do.
        """
        name = path.stem if name is None else name
        kind, remedy = (each.format(name=name) for each in (self.kind, self.remedy))
        remedy = f"delete it, and write it anew with {remedy}"
        with reading(path, f"a whole prepared {kind}", remedy), open_arrays(path) as arrays:
            if (found := self._format_of(arrays)) != self.format:
                raise ValueError(f"its format is {found!r}, not {self.format!r}")
            return self._unpack(arrays, path, name)

    def _format_of(self, arrays: ArrayFile) -> Any:
        """Return the format that a prepared file says it has."""
        return arrays.text("format")

    def _fetch(self, name: str, folder: Path | None) -> Found:
        """Get a set that is not there; this raises, with what to do, unless a domain can."""
        raise FileNotFoundError(self._advice(name, folder))

    def _check_name(self, name: str) -> None:
        """Raise unless a set of that name can be."""
        if self.names and name not in self.names:
            near = get_close_matches(name, self.names) or self.names
            raise ValueError(
                f"name {name!r} is no {self.noun}; did you mean one of {', '.join(near)}?"
            )

    @abstractmethod
    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        """Return where the files of a set lie as they are handed out, None if nowhere."""

    @abstractmethod
    def _read_files(self, name: str, place: Path) -> Found:
        """Read a set from its files."""

    @abstractmethod
    def _pack(self, found: Found) -> dict[str, Any]:
        """Return the arrays of a prepared file."""

    @abstractmethod
    def _unpack(self, arrays: ArrayFile, path: Path, name: str) -> Found:
        """Make the set of its arrays, which have to fit each other."""

    @abstractmethod
    def _advice(self, name: str, folder: Path | None) -> str:
        """Say what to do about a set that is not there."""


def sha256_of(head: str, arrays: Iterable[NDArray[Any]]) -> str:
    """Compute the checksum of a text and the arrays after it."""
    digest = hashlib.sha256(head.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def check_sha256(found: str, told: str) -> None:
    """Raise where a checksum is not the one that was written."""
    if found != told:
        raise ValueError(f"its checksum is {found[:12]}…, not {told[:12]}… as it says")
