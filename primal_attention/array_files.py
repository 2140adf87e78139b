"""Read and write arrays in `.npy` and `.npz` files, which may come from anyone.

Memory is allocated only after the sizes in all headers agree with each other and with the size of
the file. Only numbers and text are read: no objects, so no pickles.
"""

import ast
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.atomic_files import replacing
from primal_attention.foreign_files import file_size, is_plain_name

_MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 10_000  # bytes
_LAST_CHARACTER, _SURROGATE = 0x10FFFF, 0xD800 >> 11
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


def read_array(path: Path) -> NDArray[Any]:
    """Read a `.npy` file; call it within ``reading``, since errors do not name the file."""
    size = file_size(path)
    with path.open("rb") as file:
        header = _header(file, size)
        return _shaped(np.fromfile(file, header.dtype), header)


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

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays of the file."""
        return tuple(self._members)

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
        return _shaped(flat, header)

    def get(self, name: str) -> NDArray[Any] | None:
        """Return an array, or None where the file has none of that name."""
        if name not in self:
            return None
        return self[name]

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
    start = file.read(8)
    if start[:6] != _MAGIC or start[6:7] not in (b"\1", b"\2", b"\3"):
        raise ValueError("an array of numpy was expected; it is another file, or damaged")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > min(size, _LONGEST_HEADER):
        raise ValueError(f"its header says that it takes {length} bytes itself")
    text = file.read(length)
    header = _parsed(text.decode("latin-1" if start[6] < 3 else "utf-8"))
    if (rest := size - 8 - width - length) != header.num_bytes:
        raise ValueError(
            f"its header promises {header.num_bytes} bytes, {header.dtype} "
            f"{list(header.shape)}, and {rest} are there"
        )
    return header


def _parsed(text: str) -> Header:
    values: Any = ast.literal_eval(text.strip())
    if not isinstance(values, dict) or values.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header does not describe an array")
    kind, in_columns, shape = values["descr"], values["fortran_order"], values["shape"]
    if not isinstance(kind, str) or not re.fullmatch(
        r"[<>|=]?(b1|[iu][1248]|f[248]|U\d{1,9})", kind
    ):
        raise ValueError(
            f"it holds {str(kind)[:40]!r}, objects or others; only numbers and text are read"
        )
    if not isinstance(in_columns, bool) or not isinstance(shape, tuple):
        raise ValueError("its header does not describe an array")
    if not all(type(each) is int and 0 <= each < 2**63 for each in shape):
        raise ValueError(f"its shape is {str(shape)[:40]}")
    return Header(np.dtype(kind), in_columns, shape)


def _shaped(flat: NDArray[Any], header: Header) -> NDArray[Any]:
    """Shape the values after checking that the type can have each of them."""
    if header.dtype.kind == "b" and (flat.view(np.uint8) > 1).any():
        raise ValueError("it has a value that is neither true nor false")
    if header.dtype.kind == "U" and flat.nbytes:
        characters = flat.view(np.dtype("u4").newbyteorder(header.dtype.byteorder))
        if (characters > _LAST_CHARACTER).any() or (characters >> 11 == _SURROGATE).any():
            raise ValueError("it has a text of numbers that are no characters")
    return flat.reshape(header.shape, order="F" if header.in_columns else "C")
