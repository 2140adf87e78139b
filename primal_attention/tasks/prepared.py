"""Data sets on disk: where they lie, and prepared files ``<name>.npz`` of some domains."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from primal_attention.array_files import ArrayFile, open_arrays, write_arrays
from primal_attention.foreign_files import reading

Found = TypeVar("Found")


def data_folders(domain: str, folder: Path | None = None) -> list[Path]:
    """List where to look for the data of a domain.

    That is a given folder alone, or else ``<domain>`` in the folder that the environment variable
    ``PRIMAL_DATA`` names (``data`` where it is not set), then the folder around it.
    """
    if folder is not None:
        return [Path(folder)]
    data = Path(os.environ.get("PRIMAL_DATA", "data"))
    return [data / domain, data]


def name_near(name: str, known: Sequence[str]) -> str:
    """List the known names that are like another, all where none is."""
    return ", ".join(get_close_matches(name, known, cutoff=0.5) or known)


class PreparedSets(ABC, Generic[Found]):
    """The data sets of one domain: finds, reads, writes and prepares them.

    A prepared file comes before the files as they are handed out.
    """

    domain: ClassVar[str]  # the folder of its sets
    names: ClassVar[tuple[str, ...]]
    noun: ClassVar[str]  # for one of them
    format: ClassVar[str]  # of prepared files
    compressed: ClassVar[bool] = False

    def load(self, name: str, folder: Path | None = None) -> Found:
        """Read a set from its prepared file, or else from its files.

        Args:
            name: Of the set.
            folder: Where to look first and only; by default see ``data_folders``.
        """
        place = self.find(name, folder)
        if place is None:
            raise FileNotFoundError(self._advice(name, folder))
        if place.name == f"{name}.npz":
            return self.read(place, name)
        return self._read_files(name, place)

    def find(self, name: str, folder: Path | None = None) -> Path | None:
        """Return the file or folder that a set would be loaded from, None if it is not there."""
        self._check_name(name)
        prepared = (each / f"{name}.npz" for each in data_folders(self.domain, folder))
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
        if place is None:
            raise FileNotFoundError(self._advice(name, folder))
        path = self.target(name, folder, out)
        self.write(path, self._read_files(name, place))
        return path

    def target(self, name: str, folder: Path | None, out: Path | None) -> Path:
        """Return where the prepared file of a set is written."""
        place = data_folders(self.domain, folder)[0] if out is None else Path(out)
        return place / f"{name}.npz"

    def write(self, path: Path, found: Found) -> None:
        """Write a prepared file, which is there whole or not at all."""
        write_arrays(path, self._pack(found), compressed=self.compressed)

    def read(self, path: Path, name: str | None = None) -> Found:
        """Read a prepared file.

        Raises:
            ValueError: Naming the file, what is wrong with it and what to do.
        """
        name = path.stem if name is None else name
        remedy = f"delete it, and write it anew with primal data {self.domain} {name}"
        with reading(path, f"a whole prepared {self.noun}", remedy), open_arrays(path) as arrays:
            if (found := self._format_of(arrays)) != self.format:
                raise ValueError(f"its format is {found!r}, not {self.format!r}")
            return self._unpack(arrays, name)

    def _format_of(self, arrays: ArrayFile) -> Any:
        """Return the format that a prepared file says it has."""
        return arrays.text("format")

    def _check_name(self, name: str) -> None:
        if name not in self.names:
            near = name_near(name, self.names)
            raise ValueError(f"name {name!r} is no {self.noun}; did you mean one of {near}?")

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
    def _unpack(self, arrays: ArrayFile, name: str) -> Found:
        """Make the set of its arrays, which have to fit each other."""

    @abstractmethod
    def _advice(self, name: str, folder: Path | None) -> str:
        """Say what to do about a set that is not there."""
