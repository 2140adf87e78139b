"""Addresses in Triton's interpreter: what an op reads and writes lies inside the tensors it has.

On a GPU an address next to a tensor is noticed only where no memory is; in the interpreter, never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
from triton.tools.tensor_descriptor import TensorDescriptor


class OutOfBoundsError(Exception):
    """A lane that is not masked reads or writes beside all tensors of its launch."""


@contextmanager
def addresses_checked() -> Iterator[None]:
    """Every load and store of every launch."""
    prepare = GridExecutor._init_args_hst
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    spans = np.empty((2, 0), np.uint64)  # first bytes of the tensors of a launch, and their ends

    def prepared(self: Any, args: Any, kwargs: Any) -> Any:
        nonlocal spans
        made = prepare(self, args, kwargs)
        spans = _spans([*made[0], *made[1].values()])
        return made

    def loaded(self: Any, places: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        _check("reads", places, mask, spans)
        return load(self, places, mask, *rest, **options)

    def stored(self: Any, places: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check("writes", places, mask, spans)
        return store(self, places, value, mask, *rest)

    with (
        patch.object(GridExecutor, "_init_args_hst", prepared),
        patch.object(InterpreterBuilder, "create_masked_load", loaded),
        patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        yield


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for each in arguments:
        if isinstance(each, tuple):
            yield from _tensors(each)
        elif isinstance(each, TensorDescriptor):
            yield each.base
        elif isinstance(each, Tensor) and each.numel():
            yield each


def _spans(arguments: Iterable[Any]) -> np.ndarray:
    """Where the elements of the tensors lie, in order; what overlaps is one span."""
    spans: list[list[int]] = []
    for first, end in sorted(map(_span, _tensors(arguments))):
        if spans and first <= spans[-1][1]:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([first, end])
    return np.array(spans, np.uint64).reshape(-1, 2).T


def _span(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _check(what: str, places: Any, mask: Any, spans: np.ndarray) -> None:
    used = places.data[np.broadcast_to(mask.data, places.data.shape) != 0]
    size = np.uint64(max(1, places.get_element_ty().primitive_bitwidth // 8))
    span = np.searchsorted(spans[0], used, "right") - 1
    outside = (
        (span < 0) | (used + size > spans[1][span]) if spans.size else np.ones_like(used, bool)
    )
    if outside.any():
        place, count = used[outside][0], int(outside.sum())
        distance = np.abs(spans.astype(np.int64) - np.int64(place)).min() if spans.size else "?"
        raise OutOfBoundsError(f"{what} {count} elements outside, {distance} bytes from a tensor")
