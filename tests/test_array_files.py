"""Arrays from anyone: refused by their headers, before anything is allocated."""

import io
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from primal_attention.array_files import open_arrays, read_array, write_arrays
from primal_attention.foreign_files import read_bytes, read_text, reading

MIB = 2**20


@pytest.fixture(autouse=True)
def memory():
    """No more than 32 MiB are taken; numpy tells tracemalloc of its arrays."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * MIB


def npy(descr="'<f4'", order="False", shape="(2, 3)", content=bytes(24), version=1, head=None):
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"
    text = (text if head is None else head).encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + content


def archive(members, method=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for name, content in members:
            made.writestr(name, content)
    return file.getvalue()


def read_npy(path):
    with reading(path, "an array", "write it anew"):
        return read_array(path)


def read_npz(path, name="x"):
    with reading(path, "a set of arrays", "write it anew"), open_arrays(path) as arrays:
        return arrays[name]


def refused(read, path, content, message):
    """With one line that names the file, the reason and the remedy."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{path} is not .*{message}.*; write it anew$") as error:
        read(path)
    assert "\n" not in str(error.value)


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    np.array(["é", "ab"]),
    np.array("text"),
    np.array(["é\U0010ffff", ""], dtype=">U3"),
    np.array(""),
    np.array([True, False]),
    np.zeros((0, 3), np.uint8),
    np.float16(3),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_what_is_read_is_what_was_written(tmp_path, array):
    np.save(tmp_path / "a.npy", array)
    write_arrays(tmp_path / "a.npz", {"x": array, "y": array}, compressed=True)
    write_arrays(tmp_path / "b.npz", {"x": array})
    found = (
        read_npy(tmp_path / "a.npy"),
        read_npz(tmp_path / "a.npz"),
        read_npz(tmp_path / "b.npz"),
    )
    for each in found:
        assert each.dtype == array.dtype and each.shape == array.shape
        assert np.array_equal(each, array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOF"),
        (b"PK\3\4", "EOF"),
        (npy(shape="(100000000000000,)"), "promises 400000000000000 bytes"),
        (npy(shape="(2, 4)"), "promises 32 bytes, .* and 24 are there"),
        (npy(shape="(-2, -3)"), "its shape"),
        (npy(shape=f"(0, {10**30})"), ""),
        (npy(shape="(2.0, 3)"), "shape is not valid"),
        (npy(shape="6"), "shape is not valid"),
        (npy(shape="(2, 3"), "TokenError"),
        (npy(shape="(2, 3)("), "TokenError"),
        (npy(shape="(" * 3000), "TokenError|MemoryError"),
        (npy(shape="__import__('os').system('true')"), "malformed"),
        (npy(order="0"), "fortran_order is not a valid bool"),
        (npy(descr="'|O'"), "only numbers and text"),
        (npy(descr="[('a', '<f4')]"), "only numbers and text"),
        (npy(descr="'<U1000000000'"), ""),
        (npy(descr="'<c8'"), "only numbers and text"),
        (npy(head="[1, 2]"), "not a dictionary"),
        (npy(head="{}"), "correct keys"),
        (npy(version=9), "version .* is not read"),
        (npy(version=2)[:9] + b"\xff\xff\xff\xff", "EOF"),
        (npy()[:-1], "and 23 are there"),
        (npy() + b"\0", "and 25 are there"),
        (npy()[:40], "EOF"),
    ],
    ids=range(24),
)
def test_damaged_arrays_are_refused(tmp_path, content, message):
    refused(read_npy, tmp_path / "a.npy", content, message)
    refused(read_npz, tmp_path / "a.npz", archive([("x.npy", content)]), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a zip file"),
        (npy(), "not a zip file"),
        (archive([("y.npy", npy())]), "it has no array 'x'"),
        (archive([("x.npy", npy()), ("../y.npy", npy())]), "'../y.npy' is no array"),
        (archive([("x.npy", npy()), ("/etc/y.npy", npy())]), "'/etc/y.npy' is no array"),
        (archive([("x.npy", npy()), ("readme", b"")]), "'readme' is no array"),
        (archive([("x.npy", npy())], zipfile.ZIP_LZMA), "compressed by method 14"),
        (archive([("x.npy", npy())], zipfile.ZIP_BZIP2), "compressed by method 12"),
    ],
    ids=range(8),
)
def test_damaged_archives_are_refused(tmp_path, content, message):
    refused(read_npz, tmp_path / "a.npz", content, message)


def test_an_array_that_is_there_twice_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        content = archive([("x.npy", npy()), ("x.npy", npy())])
    refused(read_npz, tmp_path / "a.npz", content, "no array of its own")


@pytest.mark.parametrize("size", [0, 7, 23, 10**6, 2**32 - 2])
def test_sizes_in_the_archive_may_lie(tmp_path, size):
    content = archive([("x.npy", npy(content=bytes(24)))])
    at = content.rindex(b"PK\1\2") + 24
    changed = content[:at] + struct.pack("<I", size) + content[at + 4 :]
    refused(read_npz, tmp_path / "a.npz", changed, "")


def test_changed_values_are_seen(tmp_path):
    content = bytearray(archive([("x.npy", npy())], zipfile.ZIP_STORED))
    content[content.index(b"shape") + 20] ^= 1
    refused(read_npz, tmp_path / "a.npz", bytes(content), "")


def test_what_unpacks_to_far_more_than_it_takes_is_refused(tmp_path):
    size, path = 320 * MIB, tmp_path / "a.npz"
    made = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with made, made.open("x.npy", "w") as file:
        file.write(npy("'|u1'", shape=f"({size},)", content=b""))
        for _ in range(size // MIB):
            file.write(bytes(MIB))
    assert path.stat().st_size < 2 * MIB
    refused(read_npz, path, path.read_bytes(), "unpack to more than 256 MiB .*numpy.savez")


def test_texts_are_texts(tmp_path):
    write_arrays(tmp_path / "a.npz", {"x": np.zeros(2), "y": np.array(["a", "b"])})
    with open_arrays(tmp_path / "a.npz") as arrays:
        assert "y" in arrays and "z" not in arrays
        for name in ("x", "y"):
            with pytest.raises(ValueError, match=f"'{name}' is no text"):
                arrays.text(name)


def test_arrays_are_mapped_as_they_are(tmp_path):
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    write_arrays(tmp_path / "a.npz", {"y": np.zeros(5), "x": array})
    write_arrays(tmp_path / "b.npz", {"x": array}, compressed=True)
    with open_arrays(tmp_path / "a.npz") as arrays:
        assert isinstance(arrays.mapped("x"), np.memmap)
        assert np.array_equal(arrays.mapped("x"), array)
    with open_arrays(tmp_path / "b.npz") as arrays, pytest.raises(ValueError, match="compressed"):
        arrays.mapped("x")


# Files of any kind


@pytest.mark.parametrize("read", [read_npy, read_npz, lambda path: read_bytes(path, 10)])
def test_what_is_no_file_is_named(tmp_path, read):
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        read(tmp_path / "none")
    with pytest.raises((OSError, ValueError), match=f"{tmp_path} is a folder"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"{tmp_path / 'pipe'} is a device or a pipe"):
        read(tmp_path / "pipe")


def test_texts_that_are_none_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\xc3\xa9\n")
    assert read_text(path, 10) == "aé\n"
    path.write_bytes(b"a\xff")
    with pytest.raises(ValueError, match=rf"^{path} is not a text in UTF-8 .*byte 0xff.*anew$"):
        read_text(path, 10)
    with pytest.raises(ValueError, match=f"{path} has 2 bytes, and at most 1"):
        read_bytes(path, 1)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OverflowError("a\nb"),
        EOFError(),
        KeyError("x"),
        zipfile.BadZipFile("\x1b[31m"),
        ValueError("x" * 10_000),
        OSError("no name"),
    ],
    ids=repr,
)
def test_whatever_goes_wrong_is_one_line_with_the_name(tmp_path, error):
    with (
        pytest.raises(
            ValueError, match=r"^a\.bin is not a file of ours \(.+\); delete it$"
        ) as told,
        reading("a.bin", "a file of ours", "delete it"),
    ):
        raise error
    assert str(told.value).isprintable() and len(str(told.value)) < 400
    assert told.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "b.bin"), ModuleNotFoundError("h5py")]
)
def test_errors_that_say_enough_pass(error):
    with pytest.raises(type(error)) as told, reading("a.bin", "a file of ours", "delete it"):
        raise error
    assert told.value is error
