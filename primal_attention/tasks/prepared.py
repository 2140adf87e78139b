"""Prepared files: a data set of time series in one `.npz`, which numpy alone reads.

The values of all cases stand one after the other, beside the shape and the label of each.
"""

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays, write_arrays
from primal_attention.foreign_files import reading
from primal_attention.tasks.series import LabelledSeries

TrainAndTest: TypeAlias = tuple[LabelledSeries, LabelledSeries]

FORMAT = "primal-attention series, version 1"
PARTS = ("train", "test")


def write_prepared(path: Path, parts: TrainAndTest) -> None:
    """Write both parts; under another name first, so that a file of this name is always whole."""
    arrays: dict[str, Any] = {"format": np.array(FORMAT)}
    for name, part in zip(PARTS, parts, strict=True):
        arrays[f"{name}_shapes"] = np.array([case.shape for case in part.series], dtype=np.int64)
        arrays[f"{name}_values"] = np.concatenate([case.ravel() for case in part.series])
        arrays[f"{name}_labels"] = part.labels
    write_arrays(path, arrays, compressed=True)


def read_prepared(path: Path) -> TrainAndTest:
    """Both parts, bit for bit as they were written."""
    remedy = (
        f"delete it, and write it anew with prepare_uea({path.stem!r}, <folder of the .ts files>)"
    )
    with reading(path, "a whole prepared data set", remedy), open_arrays(path) as arrays:
        if (found := arrays.text("format")) != FORMAT:
            raise ValueError(f"its format is {found!r}, not {FORMAT!r}")
        train, test = (
            _unpacked(*(arrays[f"{name}_{key}"] for key in ("shapes", "values", "labels")))
            for name in PARTS
        )
        check_channels(path, train, test)
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
    if shapes.dtype != np.int64 or shapes.ndim != 2 or shapes.shape[1] != 2 or not len(shapes):
        raise ValueError("the shapes of its cases are wrong")
    # one larger than all values is wrong, and its product could be too large a number
    if shapes.min() < 1 or shapes.max() > values.size or np.ptp(shapes[:, 0]):
        raise ValueError("the shapes of its cases are wrong")
    sizes = shapes.prod(axis=1)
    if values.dtype != np.float32 or values.shape != (sum(sizes.tolist()),):
        raise ValueError("its values do not fit the shapes of its cases")
    if labels.dtype.kind != "U" or labels.shape != (len(shapes),):
        raise ValueError("its labels are not one string a case")
    cases = np.split(values, np.cumsum(sizes)[:-1])
    series = [case.reshape(shape) for case, shape in zip(cases, shapes, strict=True)]
    return LabelledSeries(series, labels)
