"""Read and write arrays in `.npy` and `.npz` files, which may come from anyone.

Memory is allocated only after the sizes in all headers agree with each other and with the size of
the file. Only numbers and text are read: no objects, so no pickles.
"""

import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from primal_attention.atomic_files import replacing
from primal_attention.foreign_files import file_size, is_plain_name

_HEADERS: dict[tuple[int, int], Any] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
}
_LONGEST_HEADER = 10_000  # bytes
_PIECE = 2**20  # bytes unpacked at a time
_ALWAYS, _TIMES = 2**28, 32  # bytes that any file may unpack to, and times the size of a large one


class Header(NamedTuple):
    """The header of an array."""

    dtype: np.dtype[Any]
    in_columns: bool  # Fortran's order
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, without overflow."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shaped(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Shape the values, which are in one row."""
        return flat.reshape(self.shape, order="F" if self.in_columns else "C")


def read_array(path: Path) -> NDArray[Any]:
    """Read a `.npy` file; call it within ``reading``, since errors do not name the file."""
    size = file_size(path)
    with path.open("rb") as file:
        header = _header(file, size)
        return header.shaped(np.fromfile(file, header.dtype))


class ArrayFile:
    """The arrays of an `.npz` file by name; all together unpack to a bounded size."""

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        self._path, self._archive = path, archive
        self._size = file_size(path)
        self._left = _ALWAYS + _TIMES * self._size
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename or not is_plain_name(name) or name in self._members:
                raise ValueError(f"its member {member.filename!r} is no array of its own")
            self._members[name] = member

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Copy an array into memory and check its CRC."""
        member = self._member(name)
        with self._archive.open(member) as file:
            header = _header(file, member.file_size)
            self._left -= header.num_bytes
            if self._left < 0:
                raise ValueError(
                    f"its arrays up to {name!r} unpack to more than {_ALWAYS >> 20} MiB and "
                    f"{_TIMES} times its size; numpy.savez writes them without compression"
                )
            flat = np.empty(math.prod(header.shape), header.dtype)
            view: Any = flat.view(np.uint8)
            for start in range(0, len(view), _PIECE):
                piece = view[start : start + _PIECE]
                piece[:] = np.frombuffer(file.read(len(piece)), np.uint8)
            if file.read(1):
                raise ValueError(f"{name!r} goes on after its end")
        return header.shaped(flat)

    def text(self, name: str) -> str:
        """Return a text, which is an array without dimensions."""
        array = self[name]
        if array.dtype.kind != "U" or array.shape:
            raise ValueError(f"{name!r} is no text but {array.dtype} {array.shape}")
        return str(array)

    def mapped(self, name: str) -> NDArray[Any]:
        """Map an uncompressed array into memory, copy-on-write, without checking its CRC."""
        member = self._member(name)
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name!r} is compressed")
        with self._archive.open(member) as file:
            header = _header(file, member.file_size)
        with self._path.open("rb") as whole:
            whole.seek(member.header_offset + 26)  # to the lengths of two fields before the content
            lengths = np.frombuffer(whole.read(4), dtype="<u2")
            end = whole.tell() + int(lengths.sum()) + member.file_size
            if end > self._size or not header.num_bytes or header.in_columns:
                raise ValueError(f"{name!r} cannot be mapped into memory")
            offset = end - header.num_bytes
            return np.memmap(whole, header.dtype, mode="c", offset=offset, shape=header.shape)

    def _member(self, name: str) -> zipfile.ZipInfo:
        if name not in self._members:
            raise ValueError(f"it has no array {name!r}")
        member = self._members[name]
        # other methods unpack without a limit
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{name!r} is compressed by method {member.compress_type}")
        return member


@contextmanager
def open_arrays(path: Path) -> Iterator[ArrayFile]:
    """Open an `.npz` file; call it within ``reading``, since errors do not name the file."""
    file_size(path)
    with zipfile.ZipFile(path) as archive:
        yield ArrayFile(path, archive)


def write_arrays(path: Path, arrays: Mapping[str, Any], *, compressed: bool = False) -> None:
    """Write arrays to an `.npz` file in one step and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as incoming, incoming.open("wb") as file:
        (np.savez_compressed if compressed else np.savez)(file, **arrays)


def _header(file: IO[bytes], size: int) -> Header:
    """Read the header of an array that takes, with it, ``size`` bytes."""
    start = io.BytesIO(file.read(_LONGEST_HEADER))
    version = npy.read_magic(start)  # type: ignore[no-untyped-call]
    if version not in _HEADERS:
        raise ValueError(f"version {version} of numpy's format is not read")
    shape, in_columns, dtype = _HEADERS[version](start)
    if dtype.kind not in "biufU":
        raise ValueError(
            f"it holds {str(dtype)[:40]}, objects or others; only numbers and text are read"
        )
    if any(each < 0 for each in shape):
        raise ValueError(f"its shape is {str(shape)[:40]}")
    header = Header(dtype, in_columns, shape)
    if (rest := size - start.tell()) != header.num_bytes:
        raise ValueError(
            f"its header promises {header.num_bytes} bytes, {dtype} {list(shape)}, "
            f"and {rest} are there"
        )
    file.seek(start.tell())
    return header
