"""Files of the `.ts` format: a header of `@` lines, then one labelled time series a line.

A case is `1,2,3:4,5,?:label`: channels between colons, values between commas, `?` for a missing
value, the class last. Lines that start with `#` are comments.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size
from primal_attention.tasks.series import LabelledSeries, Series

LARGEST = float(np.finfo(np.float32).max)


def read_ts(path: Path, *, labelled: bool = True) -> LabelledSeries:
    """Read the cases of a file, in float32, with NaN for missing values.

    Args:
        path: The file.
        labelled: False reads a file with ``@classLabel false`` too; its labels are empty.

    Raises:
        ValueError: Naming the file and its first line that is wrong.
    """
    parser = _Parser(labelled)
    file_size(path)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        try:
            for line in file:
                parser.feed(line.strip())
            parser.finish()
        except ValueError as error:
            raise ValueError(f"{path}, line {parser.line_number}: {error}") from error
    return LabelledSeries(parser.series, np.array(parser.labels))


class _Parser:
    """Reads a file line by line."""

    def __init__(self, labelled: bool) -> None:
        self.labelled = labelled
        self.series: Series = []
        self.labels: list[str] = []
        self.line_number = 0
        self._classes: dict[str, str] = {}  # as written in a case -> as written in the header
        self._num_channels: int | None = None
        self._equal_length = False
        self._in_data = False

    def feed(self, line: str) -> None:
        """Take one line, without the white space around it."""
        self.line_number += 1
        if not line or line.startswith("#"):
            return
        (self._read_case if self._in_data else self._read_tag)(line)

    def finish(self) -> None:
        """Check that there were a header and cases."""
        if not self._in_data:
            raise ValueError("the file ends without a line @data; it is cut off or no .ts file")
        if not self.series:
            raise ValueError("the file ends without a case after @data")

    def _read_tag(self, line: str) -> None:
        if not line.startswith("@"):
            raise ValueError(f"a header line starts with @ or #, got {_short(line)}")
        tag, *values = line[1:].split()
        match tag.lower(), [value.lower() for value in values]:
            case "timestamps" | "targetlabel" as kind, ["true", *_]:
                raise ValueError(f"@{kind} true: only labelled series without time stamps are read")
            case "equallength", [value]:
                self._equal_length = value == "true"
            case "dimensions", [value] if value.isdecimal() and len(value) < 10:
                self._num_channels = int(value)
            case "dimensions", _:
                raise ValueError(f"@dimensions is followed by one number, got {_short(line)}")
            case "classlabel", ["true", _, *_]:
                names = values[1:]
                self._classes = {name.lower(): name for name in names} | {n: n for n in names}
            case "classlabel", ["false"] if not self.labelled:
                self._classes = {"": ""}
            case "data", [] if self._classes:
                self._in_data = True
            case "data", []:
                classes = "'@classLabel true <names of the classes>'"
                raise ValueError(f"@data comes before a line {classes}")

    def _read_case(self, line: str) -> None:
        has_label = self._classes != {"": ""}
        *channels, label = line.split(":") if has_label else f"{line}:".split(":")
        if self._num_channels is None:
            self._num_channels = len(channels)
        if len(channels) != self._num_channels or not channels:
            raise ValueError(
                f"{self._num_channels or 'some'} channels and a label expected, found "
                f"{len(channels)} channels; the line ends with {line[-20:]!r}"
            )
        values = _values(channels)
        if self._equal_length and self.series and values.shape != self.series[0].shape:
            raise ValueError(
                f"@equalLength is true, but this case has {values.shape[1]} time steps and the "
                f"first has {self.series[0].shape[1]}"
            )
        self.series.append(values)
        label = label.strip()
        name = self._classes.get(label) or self._classes.get(label.lower())
        if name is None:
            raise ValueError(f"label {_short(label)} is not one of @classLabel")
        self.labels.append(name)


def _values(channels: list[str]) -> NDArray[np.float32]:
    """Parse the values of one case, [channels, length]."""
    lengths = list(dict.fromkeys(channel.count(",") + 1 for channel in channels))
    if len(lengths) > 1:
        raise ValueError(f"the channels have different lengths {str(lengths)[:60]}")
    values = np.empty((len(channels), lengths[0]))
    try:
        for row, channel in zip(values, channels, strict=True):
            row[:] = [float(text) for text in channel.replace("?", "nan").split(",")]
    except ValueError:
        raise ValueError(_first_bad(channels)) from None
    if (np.abs(values) > LARGEST).any() or "_" in "".join(channels):
        raise ValueError(_first_bad(channels))
    return values.astype(np.float32)


def _first_bad(channels: list[str]) -> str:
    """Say where the first value stands that is none."""
    for c, channel in enumerate(channels, start=1):
        for t, text in enumerate(channel.split(","), start=1):
            if not _is_value(text):
                return f"value {t} of channel {c}, {_short(text)}, is neither a number nor '?'"
    raise AssertionError("all values are numbers")


def _is_value(text: str) -> bool:
    try:
        value = float(text.replace("?", "nan"))
    except ValueError:
        return False
    return "_" not in text and (math.isnan(value) or abs(value) <= LARGEST)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
