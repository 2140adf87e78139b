"""Time series as tensors: standardised, gaps filled, padded to one length.

Letters: B cases, C channels, N tokens (one a time step).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.foreign_files import reading
from primal_attention.tasks.splits import Split, stratified_split
from primal_attention.tasks.task import CLASSIFICATION, Cases, Sizes, Task

Series: TypeAlias = list[NDArray[np.floating[Any]]]
"""Cases, each [channels, length]; the lengths may differ, NaN is a missing value."""


MOST_PADDED = 2**28  # values, of 4 bytes, that padding may make out of any number of them


class LabelledSeries(NamedTuple):
    """Time series and the names of their classes."""

    series: Series
    labels: NDArray[np.str_]


@dataclass(frozen=True, eq=False)
class SeriesEncoding:
    """Turns time series into tokens; fitted on training cases.

    Values are standardised by channel. A missing value is interpolated linearly in time, before
    the first and after the last observation it is the nearest one, and a channel without any
    observation is at its mean. Short series are padded with zeros on the right, long ones clipped.
    """

    mean: NDArray[np.float64]  # [C]
    std: NDArray[np.float64]  # [C]
    num_tokens: int

    def __post_init__(self) -> None:
        """Check that the numbers can be those of a data set."""
        if self.mean.ndim != 1 or self.mean.shape != self.std.shape or not len(self.mean):
            shapes = f"{self.mean.shape} and {self.std.shape}"
            raise ValueError(f"mean and std must have one value a channel, got shapes {shapes}")
        if not np.isfinite([self.mean, self.std]).all() or (self.std <= 0).any():
            raise ValueError(f"mean must be finite and std positive, got {self.to_dict()}")
        if self.num_tokens < 1:
            raise ValueError(f"num_tokens must be positive, got {self.num_tokens}")

    @property
    def num_channels(self) -> int:
        """Channels that each case must have."""
        return len(self.mean)

    @classmethod
    def fit(cls, series: Sequence[NDArray[Any]]) -> SeriesEncoding:
        """Compute mean and standard deviation by channel, and the longest length."""
        cases = _checked(series)
        if not cases:
            raise ValueError("series has no case to fit an encoding on")
        mean, std = _observed_moments(np.concatenate(cases, axis=1))
        return cls(mean, std, max(case.shape[1] for case in cases))

    def encode(self, series: Sequence[NDArray[Any]], *, first: int = 0) -> dict[str, Tensor]:
        """Make ``x`` [B, N, C] and ``token_mask`` [B, N], the arguments of a model.

        Args:
            series: The cases.
            first: The number of the first of them, for messages.
        """
        cases = _checked(series, self.num_channels, first)
        lengths = np.array([case.shape[1] for case in cases], dtype=np.int64)
        token_mask = np.arange(self.num_tokens) < lengths[:, None]
        x = np.zeros((*token_mask.shape, self.num_channels), dtype=np.float32)
        if cases:
            with np.errstate(over="ignore"):  # told below
                tokens = [((case - self.mean[:, None]) / self.std[:, None]) for case in cases]
                clipped = [_without_gaps(each)[:, : self.num_tokens].T for each in tokens]
                x[token_mask] = np.concatenate(clipped)
        _check_finite(rearrange(x, "b n c -> b c n"), first)
        return {"x": torch.from_numpy(x), "token_mask": torch.from_numpy(token_mask)}

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for a checkpoint or JSON."""
        numbers = {"mean": self.mean.tolist(), "std": self.std.tolist()}
        return {**numbers, "num_tokens": self.num_tokens}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SeriesEncoding:
        """Restore what ``to_dict`` described."""
        try:
            mean, std, num_tokens = (values[key] for key in ("mean", "std", "num_tokens"))
        except KeyError as error:
            raise ValueError(f"a series encoding needs {error}, got {sorted(values)}") from None
        return cls(np.asarray(mean, np.float64), np.asarray(std, np.float64), int(num_tokens))


def _checked(
    series: Sequence[NDArray[Any]], num_channels: int | None = None, first: int = 0
) -> list[NDArray[np.float64]]:
    """Convert to float64 and check that no case is empty and all have as many channels."""
    cases = [np.asarray(case, dtype=np.float64) for case in series]
    for index, case in enumerate(cases, first):
        num_channels = num_channels or len(np.atleast_1d(case))
        if case.ndim != 2 or case.shape[0] != num_channels:
            raise ValueError(
                f"case {index} must have shape [{num_channels} channels, length], got {case.shape}"
            )
        if case.size == 0:
            raise ValueError(f"case {index} is empty: its shape is {case.shape}")
    _check_finite(cases, first)
    return cases


def _check_finite(cases: Iterable[NDArray[np.floating[Any]]], first: int = 0) -> None:
    """Raise where a value is infinite, or too large for float32 once it is standardised."""
    for index, case in enumerate(cases, first):
        if (infinite := np.isinf(case)).any():
            channel = int(infinite.any(axis=1).argmax())
            raise ValueError(f"case {index}, channel {channel} has an infinite or too large value")


def _observed_moments(
    values: NDArray[np.float64],  # [C, time steps]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute mean and standard deviation of what is not NaN; 1 for a constant channel."""
    observed = ~np.isnan(values)
    count = np.maximum(observed.sum(axis=1), 1)
    with np.errstate(over="ignore"):  # an infinite std is told by the encoding
        mean = np.where(observed, values, 0.0).sum(axis=1) / count
        deviations = np.where(observed, values - mean[:, None], 0.0)
        std = np.sqrt(np.square(deviations).sum(axis=1) / count)
    varies = std > np.maximum(1e-12 * np.abs(mean), np.finfo(np.float32).tiny)
    return mean, np.where(varies, std, 1.0)


def _without_gaps(case: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate missing values in time, each channel by itself; 0 where all are missing."""
    missing = np.isnan(case)
    if not missing.any():
        return case
    filled = np.where(missing, 0.0, case)
    times = np.arange(case.shape[1])
    for values, gaps in zip(filled, missing, strict=True):
        if gaps.any() and not gaps.all():
            values[gaps] = np.interp(times[gaps], times[~gaps], values[~gaps])
    return filled


def series_task(
    name: str,
    train: Series,
    train_labels: NDArray[np.str_],
    test: Series,
    test_labels: NDArray[np.str_],
    *,
    valid: float | Literal["test"],
    seed: int,
    origin: str | None = None,
) -> Task:
    """Make a classification task of time series.

    The encoding is fitted on the cases that are trained on, and on nothing else.

    Args:
        name: Of the task.
        train: The training part.
        train_labels: The class of each; these are all the classes there are.
        test: The test part.
        test_labels: The class of each.
        valid: The fraction of the training part to validate on, taken class by class; or ``test``:
            train on all of it and validate on the test cases, as the paper does.
        seed: Of the split.
        origin: The file or folder of the series, for messages; the name of the task by default.
    """
    names = np.unique(np.asarray(train_labels, dtype=np.str_))
    wrong = partial(reading, origin or name, "a data set to learn from", "mend or remove the cases")
    with wrong():
        train_targets = _targets("train", train, train_labels, names)
        test_targets = _targets("test", test, test_labels, names)
    kept, held_out = Split(np.arange(len(train)), np.arange(0))
    if valid != "test":
        if isinstance(valid, str):
            choices = "a fraction of the training cases or 'test'"
            raise ValueError(f"valid must be {choices}, got {valid!r}")
        kept, held_out = stratified_split(train_targets, valid, seed)
    with wrong():
        encoding = SeriesEncoding.fit([train[i] for i in kept])
        train_cases = _cases(encoding, train, train_targets, kept)
        test_cases = _cases(encoding, test, test_targets, np.arange(len(test)))
        valid_cases = test_cases
        if valid != "test":
            valid_cases = _cases(encoding, train, train_targets, held_out)
    return Task(
        name,
        CLASSIFICATION,
        Sizes(encoding.num_tokens, len(names), num_channels=encoding.num_channels),
        train=train_cases,
        valid=valid_cases,
        test=test_cases,
        labels=tuple(names.tolist()),
        encoding=encoding,
    )


def _cases(
    encoding: SeriesEncoding, series: Series, targets: NDArray[np.int64], part: NDArray[np.int64]
) -> Cases:
    """Encode some of the cases, unless a few long ones would make a large array of padding."""
    chosen = [series[i] for i in part]
    values = sum(case.size for case in chosen)
    padded = sum(len(case) for case in chosen) * encoding.num_tokens
    if padded > MOST_PADDED and padded > 100 * values:
        raise ValueError(
            f"its cases have up to {encoding.num_tokens} time steps, and {values} values in all; "
            f"padded to one length they take {padded * 4 >> 30} GiB"
        )
    return Cases(encoding.encode(chosen), torch.from_numpy(targets[part]))


def _targets(
    part: str, series: Series, labels: NDArray[np.str_], names: NDArray[np.str_]
) -> NDArray[np.int64]:
    """Look up each label among the sorted names."""
    labels = np.asarray(labels, dtype=np.str_)
    if len(series) != len(labels):
        raise ValueError(f"{part} has {len(series)} series and {len(labels)} labels")
    if unknown := sorted(set(labels.tolist()) - set(names.tolist())):
        known = names.tolist()
        raise ValueError(f"{part} has labels {unknown[:5]} that train has not; it has {known}")
    return np.searchsorted(names, labels).astype(np.int64)
