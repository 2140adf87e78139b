"""Arrays in hdf5 files, which may come from anyone: sizes are checked before anything is read."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from primal_attention.foreign_files import file_size
from primal_attention.tasks.offline_rl.simulators import package

_ALWAYS, _TIMES = 2**28, 32  # bytes that any file may unpack to, and times the size of a large one
_LONGEST_CHUNK = 2**26  # bytes that are unpacked in one piece
_FILTERS = (
    1,
    2,
    3,
    32000,
)  # deflate, shuffle, Fletcher's checksum, LZF: all of them are h5py's own


class Hdf5File:
    """The arrays of numbers of a file, by name; all together unpack to a bounded size."""

    def __init__(self, path: Path, file: Any):
        self._file = file
        self._left = _ALWAYS + _TIMES * file_size(path)

    def __contains__(self, name: str) -> bool:
        return name in self._file

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays and groups at the top of the file."""
        return tuple(self._file)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """An array of numbers, as it stands in the file itself."""
        found = self._found(name)
        size = math.prod(found.shape) * found.dtype.itemsize
        self._left -= size
        if self._left < 0:
            raise ValueError(
                f"its arrays up to {name!r} unpack to more than {_ALWAYS >> 20} MiB and {_TIMES} "
                "times its size"
            )
        filters = found.id.get_create_plist()
        kinds = [filters.get_filter(i)[0] for i in range(filters.get_nfilters())]
        if not set(kinds) <= set(_FILTERS):
            raise ValueError(f"{name!r} is compressed by the methods {kinds} of hdf5")
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > _LONGEST_CHUNK:
            raise ValueError(f"{name!r} has chunks of {found.chunks}")
        values: NDArray[Any] = found[()]
        return values

    def _found(self, name: str) -> Any:
        """A data set that takes nothing from other files."""
        h5py, place = package("h5py"), self._file
        for part in name.split("/"):
            link = place.get(part, getlink=True) if isinstance(place, h5py.Group) else None
            if link is None:
                raise ValueError(f"it has no {name!r}")
            if not isinstance(link, h5py.HardLink):
                raise ValueError(f"{name!r} is a link, not an array of the file")
            place = place[part]
        if not isinstance(place, h5py.Dataset) or place.is_virtual or place.external:
            raise ValueError(f"{name!r} is no array of the file")
        if place.shape is None or place.dtype.kind not in "biuf" or place.dtype.itemsize > 8:
            raise ValueError(f"{name!r} holds {place.dtype}, not numbers")
        return place


@contextmanager
def open_hdf5(path: Path) -> Iterator[Hdf5File]:
    """The arrays of an hdf5 file.

    Raises:
        Exception: Of any kind, and without the name of the file: to be called within ``reading``.
    """
    h5py = package("h5py")
    file_size(path)
    with h5py.File(path, "r") as file:
        yield Hdf5File(path, file)
