"""Cases made in chunks, by several processes."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Arrays: TypeAlias = Sequence[NDArray[Any]]
Make: TypeAlias = Callable[[int], Arrays]
InChunks: TypeAlias = Callable[[Make, int, int], Arrays]
"""``made_in_chunks`` that knows its workers: takes make, num_cases and chunk_size."""


def made_in_chunks(make: Make, num_cases: int, chunk_size: int, *, workers: int = 1) -> Arrays:
    """Return the arrays that ``make`` makes, joined: the same for any number of workers.

    Args:
        make: Of the index of a chunk, its arrays; it can be pickled, and depends on nothing else.
        num_cases: How many to make; the last chunk is cut.
        chunk_size: Cases of a chunk.
        workers: Processes; 1 for none but this one.
    """
    if workers < 1:
        raise ValueError(f"workers must be positive, got {workers}")
    num_chunks = -(-num_cases // chunk_size)
    joined: list[NDArray[Any]] = []
    for index, arrays in enumerate(_made(make, num_chunks, workers)):
        joined = joined or [np.empty((num_cases, *each.shape[1:]), each.dtype) for each in arrays]
        first = index * chunk_size
        for whole, each in zip(joined, arrays, strict=True):
            whole[first : first + chunk_size] = each[: num_cases - first]
    return joined


def _made(make: Make, num_chunks: int, workers: int) -> Iterator[Arrays]:
    if workers == 1:
        yield from map(make, range(num_chunks))
        return
    #   Forks of this process, which may have threads, could hang.
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, num_chunks), mp_context=processes) as pool:
        yield from pool.map(make, range(num_chunks))
