"""Prepared files: a data set of time series in one `.npz`, which numpy alone reads.

The values of all cases stand one after the other, beside the shape and the label of each.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks.series import LabelledSeries
from primal_attention.whole_files import replacing

TrainAndTest: TypeAlias = tuple[LabelledSeries, LabelledSeries]

FORMAT = "primal-attention series, version 1"
PARTS = ("train", "test")
WRONG_FILE = (  # what numpy raises on files that are cut off, damaged or something else
    *(ValueError, TypeError, KeyError, IndexError, EOFError, OSError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error),
)


def write_prepared(path: Path, parts: TrainAndTest) -> None:
    """Write both parts; under another name first, so that a file of this name is always whole."""
    arrays: dict[str, Any] = {"format": np.array(FORMAT)}
    for name, part in zip(PARTS, parts, strict=True):
        arrays[f"{name}_shapes"] = np.array([case.shape for case in part.series], dtype=np.int64)
        arrays[f"{name}_values"] = np.concatenate([case.ravel() for case in part.series])
        arrays[f"{name}_labels"] = part.labels
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as incoming, incoming.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_prepared(path: Path) -> TrainAndTest:
    """Both parts, bit for bit as they were written."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if (found := str(arrays["format"])) != FORMAT:
                raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
            train, test = (
                _unpacked(*(arrays[f"{name}_{key}"] for key in ("shapes", "values", "labels")))
                for name in PARTS
            )
        check_channels(path, train, test)
    except WRONG_FILE as error:
        raise ValueError(
            f"{path} is not a whole prepared data set ({error}); delete it, and write it anew with "
            f"prepare_uea({path.stem!r}, <folder of the .ts files>)"
        ) from error
    return train, test


def check_channels(path: Path, train: LabelledSeries, test: LabelledSeries) -> None:
    """Both parts have the same channels."""
    numbers = [len(part.series[0]) for part in (train, test)]
    if numbers[0] != numbers[1]:
        raise ValueError(f"{path}: {numbers[0]} channels in train, {numbers[1]} in test")


def _unpacked(
    shapes: NDArray[np.int64], values: NDArray[np.float32], labels: NDArray[np.str_]
) -> LabelledSeries:
    """The cases of one part; the arrays have to fit each other."""
    if shapes.ndim != 2 or shapes.shape[1] != 2 or shapes.min() < 1 or np.ptp(shapes[:, 0]):
        raise ValueError("the shapes of its cases are wrong")
    sizes = shapes.prod(axis=1)
    if values.dtype != np.float32 or values.shape != (sizes.sum(),):
        raise ValueError("its values do not fit the shapes of its cases")
    if labels.dtype.kind != "U" or labels.shape != (len(shapes),):
        raise ValueError("its labels are not one string a case")
    cases = np.split(values, np.cumsum(sizes)[:-1])
    series = [case.reshape(shape) for case, shape in zip(cases, shapes, strict=True)]
    return LabelledSeries(series, labels)
