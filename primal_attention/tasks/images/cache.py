"""Prepared pictures: the bytes of all files, as they are, in one `.npz`."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import ArrayFile, open_arrays, write_arrays
from primal_attention.foreign_files import reading
from primal_attention.tasks.images.decoding import check_pictures
from primal_attention.tasks.images.folders import Encoded, PictureSet

FORMAT = "primal-attention images, version 1"
PARTS = ("train", "test")
MOST = 2**32  # bytes: a larger set is better read from its folder


def write_prepared(path: Path, pictures: PictureSet) -> None:
    """Write a file; under another name first, so that a file of this name is always whole.

    Each picture is looked at, so that one that is cut off is found now.
    """
    classes = "\n".join(pictures.classes).encode()
    arrays: dict[str, Any] = {"classes": np.frombuffer(classes, dtype=np.uint8)}
    for part in PARTS:
        packed = _packed(getattr(pictures, part))
        arrays |= {f"{part}_{key}": each for key, each in packed.items()}
    for encoded in (pictures.train, pictures.test):
        check_pictures(encoded)
    write_arrays(path, {"format": np.array(FORMAT), **arrays})


def read_prepared(path: Path) -> PictureSet:
    """The pictures of a file, still encoded.

    Raises:
        ValueError: Naming the file, what is wrong with it and what to do.
    """
    remedy = (
        f"delete it, and write it anew with prepare_images({path.stem!r}, <folder of its pictures>)"
    )
    with reading(path, "a whole prepared set of pictures", remedy), open_arrays(path) as arrays:
        if (found := arrays.text("format")) != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        classes = tuple(arrays["classes"].tobytes().decode().split("\n"))
        return PictureSet(classes, *(_unpacked(path, part, arrays, len(classes)) for part in PARTS))


def _packed(encoded: Encoded) -> dict[str, NDArray[Any]]:
    """All files one after the other, where each ends, and its class."""
    files, total = list[bytes](), 0
    for i in range(len(encoded)):
        files.append(encoded.read(i))
        total += len(files[-1])
        if total > MOST:
            raise ValueError(
                f"{encoded.name(i)}: up to here there are more than {MOST >> 30} GiB; a set "
                "of this size is not prepared but read from its folder"
            )
    ends = np.cumsum([len(each) for each in files], dtype=np.int64)
    blob = np.frombuffer(b"".join(files), dtype=np.uint8)
    return {"bytes": blob, "ends": ends, "labels": encoded.labels.astype(np.int32)}


def _unpacked(path: Path, part: str, arrays: ArrayFile, num_classes: int) -> Encoded:
    """The pictures of one part; the arrays have to fit each other."""
    blob, ends, labels = (arrays[f"{part}_{key}"] for key in ("bytes", "ends", "labels"))
    kinds = [each.dtype.name for each in (blob, ends, labels)]
    if kinds != ["uint8", "int64", "int32"] or {blob.ndim, ends.ndim, labels.ndim} != {1}:
        raise ValueError(f"its arrays of {part} are of other types")
    sizes = np.diff(ends, prepend=0)
    if len(labels) != len(ends) or sizes.min() < 0 or ends[-1] != len(blob):
        raise ValueError(f"its pictures of {part} do not fit their number")
    if set(labels.tolist()) != set(range(num_classes)):
        raise ValueError(f"its classes are not those of {part}")
    return Encoded(
        lambda i: blob[ends[i] - sizes[i] : ends[i]].tobytes(),
        lambda i: f"{path}, picture {i} of {part}",
        labels.astype(np.int64),
    )
