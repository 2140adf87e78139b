"""Long work in chunks: by several processes, and not done twice after an interruption."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import open_arrays, write_arrays
from primal_attention.foreign_files import reading

Arrays: TypeAlias = Sequence[NDArray[Any]]
Shapes: TypeAlias = Sequence[tuple[int, ...]]
Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done, and of how much."""
InChunks: TypeAlias = Callable[..., Iterator[list[NDArray[Any]]]]
"""``made_in_chunks`` that knows its folder and workers: takes make, num_chunks and shapes."""


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


def made_in_chunks(
    make: Callable[[int], Arrays],
    num_chunks: int,
    folder: Path,
    *,
    shapes: Shapes,
    workers: int = 1,
    progress: Progress = no_progress,
) -> Iterator[list[NDArray[Any]]]:
    """Yield what ``make`` returns for each chunk, in order, for any number of workers.

    Args:
        make: Of the index of a chunk; it can be pickled, and depends on nothing else.
        num_chunks: How many to make.
        folder: Where chunks are kept; what is there already is not made again.
        shapes: Of the arrays of a chunk, which are uint8.
        workers: Processes; 1 for none but this one.
        progress: Called after every chunk.
    """
    if workers < 1:
        raise ValueError(f"workers must be positive, got {workers}")
    paths = [folder / f"{index:06}.npz" for index in range(num_chunks)]
    missing = [index for index, path in enumerate(paths) if not path.is_file()]
    done = num_chunks - len(missing)
    progress(done, num_chunks)
    for _ in _all_made(make, missing, paths, min(workers, len(missing))):
        progress(done := done + 1, num_chunks)
    return map(partial(_chunk, shapes), paths)


def _all_made(
    make: Callable[[int], Arrays], missing: list[int], paths: list[Path], workers: int
) -> Iterator[None]:
    """Make the missing chunks, one a step."""
    if workers <= 1:
        for index in missing:
            _make(make, index, paths[index])
            yield
        return
    pool = ProcessPoolExecutor(workers, mp_context=_processes())
    try:
        tasks = [pool.submit(_make, make, index, paths[index]) for index in missing]
        for task in as_completed(tasks):
            yield task.result()  # raises what went wrong
    finally:
        pool.shutdown(cancel_futures=True)


def _processes() -> BaseContext:
    """Choose how to start processes: forks of this one, which may have threads, could hang.

    A server that has the package imported forks them; where there is none, each imports it.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    return server


def _make(make: Callable[[int], Arrays], index: int, path: Path) -> None:
    write_arrays(path, {str(i): array for i, array in enumerate(make(index))})


def _chunk(shapes: Shapes, path: Path) -> list[NDArray[Any]]:
    """Read the arrays of a chunk."""
    with reading(path, "a whole chunk", "delete it and try again"), open_arrays(path) as arrays:
        found = [arrays[str(i)] for i in range(len(shapes))]
        kinds = {each.dtype for each in found}
        if [each.shape for each in found] != list(shapes) or kinds != {np.dtype(np.uint8)}:
            raise ValueError(f"its arrays are not uint8 {list(shapes)}")
        return found
