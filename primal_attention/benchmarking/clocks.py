"""Clocks: the time of a call, of the GPU's work alone, and how fast the memory can be copied."""

import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple

import torch

from primal_attention.training.step import garbage_kept

Run = Callable[[], object]
_SECONDS = 0.06  # that one clock spends on one subject, about
_BATCHES = 5
_PACKAGE = Path(torch.__file__).parent


class HostSynchronisationError(RuntimeError):
    """A step waits for the GPU, so that it cannot be captured as a graph."""


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_ms(run: Run, device: torch.device) -> float:
    """Return the median time of a synchronised call; of more calls on a CPU, often shared."""
    times: list[float] = []
    least = 7 if device.type == "cpu" else 3
    while len(times) < least or (sum(times) < _SECONDS and len(times) < 20):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def graph_ms(run: Run, device: torch.device) -> float:
    """Time of the GPU's work in a run: its graph is replayed again and again without a gap.

    Raises:
        HostSynchronisationError: Naming the function, where the host waits for the GPU in a run.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # which also undoes what a failed capture leaves behind
        run()
        check_no_synchronisation(run)
        wait(device)
        graph = torch.cuda.CUDAGraph()
        with garbage_kept(), torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        first = back_to_back_ms(graph.replay, 1)
        count = max(1, min(50, round(1e3 * _SECONDS / _BATCHES / max(first, 1e-3))))
        return statistics.median(back_to_back_ms(graph.replay, count) for _ in range(_BATCHES))


def back_to_back_ms(run: Run, count: int) -> float:
    """Time of the GPU's work in one of so many runs that the host does not wait between."""
    start, end = _event(), _event()
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def check_no_synchronisation(run: Run) -> None:
    """Raise, naming the function, where the host waits for the GPU in a run."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode does not see every synchronisation
            torch.cuda.set_sync_debug_mode("error")
        run()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise HostSynchronisationError(f"host synchronisation in {culprit(error)}") from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


def culprit(error: BaseException) -> str:
    """Name the innermost function outside of torch that an error came through, file and line."""
    name = "torch"
    for frame, line in walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(_PACKAGE):
            name = f"{frame.f_code.co_qualname} ({path.name}:{line})"
    return name


def peak_mib(run: Run, device: torch.device) -> float | None:
    """Measure the peak memory of a run, above the memory allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    wait(device)
    return float(torch.cuda.max_memory_allocated(device) - before) / 2**20


class Copy(NamedTuple):
    """A plain copy of large tensors: what memory can do at best."""

    moved: int  # bytes, read and written ones both counted
    gpu_ms: float | None
    wall_ms: float

    @property
    def rate(self) -> float:
        """Bytes a millisecond."""
        return self.moved / (self.gpu_ms or self.wall_ms)


def measure_copy(device: torch.device) -> Copy:
    """Copy 2 GiB, or a quarter of the free memory where that is less; 128 MiB on a CPU.

    Not as a graph: in a graph a copy is left to the copy engines, which are slower (on an H200 1.58
    ms in place of 1.06).
    """
    size = 2**27
    if device.type == "cuda":
        size = min(2**31, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    warm_up(device)

    def run() -> object:
        return target.copy_(source)

    run()  # which has to load the code of it
    gpu = None
    if device.type == "cuda":
        gpu = statistics.median(back_to_back_ms(run, 20) for _ in range(_BATCHES))
    return Copy(2 * size, gpu, wall_ms(run, device))


def warm_up(device: torch.device, *, seconds: float = 0.5) -> None:
    """Keep a GPU busy until its clocks are up."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            a @ a
        wait(device)
