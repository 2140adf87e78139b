"""The fused causal ops: checked against float64, then timed over block sizes, warps and stages.

    python benchmarks/fused_causal.py [--ops running_mean scan] [--dtypes bfloat16 float32]

Prints one row for each op, pass, length and configuration: microseconds by graph replay, and the
bandwidth of what has to be moved at the least (inputs read once, outputs written once) beside that
of a plain copy. With TRITON_INTERPRET=1 and --tiny it runs on a CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from primal_attention.ops.launch import Config
from primal_attention.ops.running_mean import chunked as mean_chunked
from primal_attention.ops.running_mean import token_counts
from primal_attention.ops.running_mean import triton as running_mean
from primal_attention.ops.scan import chunked as scan_chunked
from primal_attention.ops.scan import triton as scan
from torch import Tensor

from primal_attention.ops import launch

HEADS, WIDTH, DIRECTIONS = 8, 64, 32
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-6}
CANDIDATES = [
    Config(block, warps, stages)
    for block, warps, stages in (
        (64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (32, 4, 2), (32, 4, 3), (16, 8, 2),
    )
]  # fmt: skip
PROGRAMS = (264, 512, 1056)


class Sizes(NamedTuple):
    batch: int
    length: int
    heads: int
    width: int


class Passes(NamedTuple):
    """One op on given inputs: its two passes, and the same in float64."""

    forward: Callable[[], tuple[Tensor, ...]]
    backward: Callable[[], tuple[Tensor, ...]]
    exact: Callable[[], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    moved: tuple[int, int]  # bytes of each pass
    tables: tuple[dict[Any, Config], ...]


def randn(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def wide(*tensors: Any) -> list[Any]:
    floating = [isinstance(x, Tensor) and x.is_floating_point() for x in tensors]
    return [x.double() if is_float else x for x, is_float in zip(tensors, floating, strict=True)]


def size_of(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def running_mean_passes(sizes: Sizes, dtype: torch.dtype, device: str) -> Passes:
    z, d_mean = (randn(*sizes, dtype=dtype, device=device) for _ in range(2))
    B, _, H, C = sizes
    d_total, counts = torch.randn(B, H, C, device=device), token_counts(z, None, None)
    return Passes(
        lambda: running_mean.forward(z, None, counts, None),
        lambda: running_mean.backward(d_mean, d_total, counts, None),
        lambda: (
            mean_chunked.forward_in_pieces(*wide(z), None, counts, None),
            mean_chunked.backward_in_pieces(*wide(d_mean, d_total), counts, None),
        ),
        (2 * size_of(z), 2 * size_of(z)),
        (running_mean.CONFIGS,),
    )


def scan_passes(sizes: Sizes, dtype: torch.dtype, device: str) -> Passes:
    B, N, H, C = sizes
    q, k = (randn(*sizes, dtype=dtype, device=device) for _ in range(2))
    h = randn(B, N, H, DIRECTIONS, dtype=dtype, device=device)
    value_map = torch.randn(DIRECTIONS, C, device=device) / C**0.5
    given = q, k, h, value_map, None
    options = None, "cosine", "cosine"
    d_out, d_state = torch.randn(*sizes, device=device), torch.randn(B, H, C, C, device=device)
    exact = wide(d_out, d_state)
    return Passes(
        lambda: scan.forward(*given, *options),
        lambda: scan.backward(*given, *options, d_out, d_state),
        lambda: (
            scan_chunked.forward_in_pieces(*wide(*given), *options),
            scan_chunked.backward_in_pieces(*wide(*given), *options, *exact),
        ),
        (size_of(q, k, h, d_out), size_of(q, k, h, d_out, q, k, h)),
        (scan.FORWARD, scan.BACKWARD),
    )


OPS = {"running_mean": running_mean_passes, "scan": scan_passes}


def check(passes: Passes, dtype: torch.dtype) -> float:
    """The largest error of any output or gradient, by norm; raises where it is too large."""
    wanted = passes.exact()
    got = passes.forward(), passes.backward()
    errors = [
        float((one.double() - other).norm() / other.norm().clamp(min=1e-30))
        for ours, exact in zip(got, wanted, strict=True)
        for one, other in zip(ours, exact, strict=True)
        if one.numel()
    ]
    worst = max(errors)
    if not worst <= TOLERANCE[dtype]:
        raise AssertionError(f"errors {errors} for {dtype}, at most {TOLERANCE[dtype]} expected")
    return worst


def microseconds(function: Callable[[], Any], device: str, repeats: int = 20) -> float:
    if device == "cpu":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e6
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def copy_bandwidth(device: str) -> float:
    """TB/s of a plain copy, read and written."""
    source = torch.ones(1 << (28 if device == "cuda" else 16), device=device)
    target = torch.empty_like(source)
    return 2 * size_of(source) / microseconds(lambda: target.copy_(source), device) / 1e6


@contextmanager
def configured(passes: Passes, config: Config | None, programs: int) -> Iterator[None]:
    """With one configuration in place of the tables, and so many programs wanted."""
    saved = [dict(table) for table in passes.tables]
    before = launch.PROGRAMS, running_mean.PROGRAMS
    launch.PROGRAMS = running_mean.PROGRAMS = programs
    if config is not None:
        for table in passes.tables:
            table.update(dict.fromkeys(table, config))
    try:
        yield
    finally:
        launch.PROGRAMS, running_mean.PROGRAMS = before
        for table, old in zip(passes.tables, saved, strict=True):
            table.update(old)


def report(
    name: str, sizes: Sizes, dtype: torch.dtype, device: str, copy: float, tiny: bool
) -> None:
    """One row for the tables as they are, and one for each candidate that builds."""
    candidates: list[Config | None] = [None, *(CANDIDATES[:1] if tiny else CANDIDATES)]
    passes = OPS[name](sizes, dtype, device)
    for config in candidates:
        for programs in (launch.PROGRAMS,) if config is not None else PROGRAMS:
            with configured(passes, config, programs):
                times = timed(passes, device)
            if times is None:
                continue
            for what, took, moved in zip(("forward", "backward"), times, passes.moved, strict=True):
                speed = moved / took / 1e6
                shown = "table" if config is None else f"{config[0]},{config[1]},{config[2]}"
                print(
                    f"{name:14s} {str(dtype)[6:]:9s} N={sizes.length:<6d} {what:9s}"
                    f"{shown:8s} programs>={programs:<5d}{took:9.1f} us {speed:6.2f} TB/s"
                    f" {100 * speed / copy:5.1f} % of a copy",
                    flush=True,
                )


def timed(passes: Passes, device: str) -> list[float] | None:
    """Microseconds of both passes; None where a configuration does not fit the card."""
    try:
        passes.forward()  # leaves what the backward pass reads in blocks of the same size
        return [microseconds(step, device) for step in (passes.forward, passes.backward)]
    except Exception as error:
        print(f"  left out: {type(error).__name__}: {str(error)[:90]}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", default=list(OPS), choices=list(OPS))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 4096, 65536])
    parser.add_argument("--total", type=int, default=65536, help="tokens of a batch")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    arguments = parser.parse_args()
    device = "cpu" if arguments.tiny else "cuda"
    torch.manual_seed(0)
    copy = copy_bandwidth(device)
    print(f"a copy moves {copy:.2f} TB/s")
    small = Sizes(2, 37, 1, 16) if arguments.tiny else Sizes(2, 1531, HEADS, WIDTH)
    for name in arguments.ops:
        for dtype in (getattr(torch, one) for one in arguments.dtypes):
            print(f"{name} {dtype}: error {check(OPS[name](small, dtype, device), dtype):.1e}")
            for length in arguments.lengths:
                batch = max(1, arguments.total // length)
                sizes = small if arguments.tiny else Sizes(batch, length, HEADS, WIDTH)
                report(name, sizes, dtype, device, copy, arguments.tiny)


if __name__ == "__main__":
    main()
