"""The fused ops on one GPU: values and gradients against float64, then the time of each choice.

    python benchmarks/fused.py [--tokens 65536] [--dim 512] [--quick]

First every shape of a list is checked, forward and backward: no error may be above twice that of
the same arithmetic written out in the same dtype. Then both passes are timed for a list of sizes
(tokens of a block, columns of a tile, warps, stages, programs) by replaying a graph, with the bytes
they move over the time as a share of what a plain copy reaches. All processors compile beforehand.
On a CPU (with TRITON_INTERPRET=1) the same runs with tiny sizes and times that mean nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import torch
from primal_attention.ops.moment import triton as fused_moment
from primal_attention.ops.moment.chunked import backward_in_pieces as moment_backward
from primal_attention.ops.moment.chunked import forward_in_pieces as moment_forward
from primal_attention.ops.primal.chunked import backward_in_pieces, forward_in_pieces
from primal_attention.ops.triton_launch import Config
from torch import Tensor

from primal_attention.ops.primal import triton as fused_primal

HALF, FULL = torch.bfloat16, torch.float32
SWEEPS = [(64, HALF), (128, HALF), (64, FULL)]
CHECKS = [  # B, N, H, P
    ((2, 1000, 3, 64), HALF),
    ((2, 1024, 3, 64), HALF),
    ((2, 1000, 3, 64), torch.float16),
    ((2, 1000, 3, 64), FULL),
    ((1, 777, 2, 128), HALF),
    ((1, 300, 2, 256), HALF),
    ((1, 300, 2, 256), FULL),
    ((3, 65, 2, 20), FULL),
    ((2, 1, 1, 48), torch.float16),
]
QUICK_CHECKS = [((1, 19, 2, 5), torch.float16), ((1, 19, 1, 70), FULL)]
Run = Callable[[], object]


def error(actual: Tensor, exact: Tensor) -> float:
    if not exact.numel():
        return 0.0
    return float((actual.double() - exact).norm() / exact.norm().clamp(min=1e-300))


def inputs(B: int, N: int, H: int, P: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """Queries and keys as two halves of one projection, and everything else of one call."""
    generator = torch.Generator(device).manual_seed(B + N + H + P)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k = randn(B, N, 2, H, P).to(dtype).unbind(2)
    return {
        "q": q,
        "k": k,
        "a_e": randn(B, H, P, P) / P**0.5,
        "a_r": randn(B, H, P, P) / P**0.5,
        "bias": randn(P).to(dtype),
        "mask": torch.rand(B, N, generator=generator, device=device) < 0.8,
        "d_out": randn(B, N, H, P).to(dtype),
        "d_gram_q": randn(B, H, P, P) / N,
        "d_gram_k": randn(B, H, P, P) / N,
    }


def arguments(x: dict[str, Tensor], *, masked: bool, shared: bool) -> tuple[list, list]:
    """Arguments of the forward and the backward pass."""
    a = [x["a_e"][0], x["a_r"][0]] if shared else [x["a_e"], x["a_r"]]
    common = [x["q"], x["k"], *a, x["bias"], x["mask"] if masked else None, "cosine", "cosine"]
    return [*common, True, True], [*common, x["d_out"], x["d_gram_q"], x["d_gram_k"]]


def double(values: list) -> list:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in values]


def eager(forward: list, backward: list) -> tuple[list[Tensor], list[Tensor]]:
    """The collapsed form written out in the dtype of the queries, by autograd; without a mask."""
    q, k, a_e, a_r, bias = (x.detach().to(forward[0].dtype).requires_grad_() for x in forward[:5])
    phi_q, phi_k = ((z / z.norm(dim=-1, keepdim=True)).transpose(1, 2) for z in (q, k))
    out = (phi_q @ a_e + phi_k @ a_r + bias).transpose(1, 2)
    values = [out, phi_q.mT @ phi_q, phi_k.mT @ phi_k]
    cotangents = [d.to(value.dtype) for d, value in zip(backward[-3:], values, strict=True)]
    grads = torch.autograd.grad(values, (q, k, a_e, a_r, bias), cotangents)
    return [value.detach() for value in values], list(grads)


def check(device: str, *, quick: bool) -> bool:
    """Print the errors of every shape; whether none is above twice that of eager arithmetic."""
    good = True
    cases = QUICK_CHECKS if quick else CHECKS
    for (shape, dtype), masked, shared in product(cases, (False, True), (False, True)):
        forward, backward = arguments(inputs(*shape, dtype, device), masked=masked, shared=shared)
        got = [*fused_primal.forward(*forward), *fused_primal.backward(*backward)]
        exact = [*forward_in_pieces(*double(forward)), *backward_in_pieces(*double(backward))]
        errors = [error(one, other) for one, other in zip(got, exact, strict=True)]
        limits = [{HALF: 1e-2, torch.float16: 2e-3, FULL: 2e-6}[dtype]] * len(errors)
        if not masked:
            values, grads = eager(forward, backward)
            limits = [2 * error(x, y) for x, y in zip([*values, *grads], exact, strict=True)]
            limits = [max(limit, 1e-6) for limit in limits]
        bad = [f"{e:.1e}>{l:.1e}" for e, l in zip(errors, limits, strict=True) if not e <= l]
        good &= not bad
        text = " ".join(f"{e:.1e}" for e in errors)
        print(
            f"{shape} {dtype} masked={masked} shared={shared}: {text}", "BAD" if bad else "", *bad
        )
        good &= check_moment(forward, backward)
    return good


def check_moment(forward: list, backward: list) -> bool:
    q, mask, values = forward[0], forward[5], backward[-3]
    d_moment = torch.ones_like(backward[-1])
    got = [fused_moment.forward(q, values, mask, "cosine")]
    got += fused_moment.backward(q, values, mask, "cosine", d_moment)
    exact = [moment_forward(q.double(), values.double(), mask, "cosine")]
    exact += moment_backward(q.double(), values.double(), mask, "cosine", d_moment.double())
    limit = {HALF: 1e-2, torch.float16: 2e-3, FULL: 2e-6}[q.dtype]
    errors = [error(one, other) for one, other in zip(got, exact, strict=True)]
    if bad := not all(e <= limit for e in errors):
        print("BAD moment", errors)
    return not bad


def milliseconds(run: Run, device: str, repeats: int = 20) -> float:
    """GPU time of one run by graph replay, the median; the plain time on a CPU."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def candidates(width: int, dtype: torch.dtype) -> list[Config]:
    """Sizes worth trying."""
    if dtype == FULL:
        sizes, tiles = product((16, 32, 64), (4, 8), (1, 2)), (width // 2, width)
    elif width == 64:
        sizes, tiles = product((32, 64, 128), (4, 8), (2, 3, 4)), (width,)
    else:
        sizes, tiles = product((32, 64), (4, 8), (2, 3)), (64, width)
    return [Config(block, tile, *rest) for (block, *rest), tile in product(sizes, tiles)]


def without_gpu() -> None:
    """From here on fused ops are compiled for a Hopper GPU into Triton's cache, and never run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    driver.set_active(Hopper())
    run = JITFunction.run

    def only_compile(self: JITFunction, *arguments: Any, **options: Any) -> None:
        run(self, *arguments, **{**options, "warmup": True})

    JITFunction.run = only_compile


def compile_check(shape: tuple[int, ...], dtype: torch.dtype, masked: bool) -> None:
    """What `check` launches for one shape."""
    forward, backward = arguments(inputs(*shape, dtype, "cpu"), masked=masked, shared=False)
    q, mask, values = forward[0], forward[5], backward[-3]
    fused_primal.forward(*forward)
    fused_primal.backward(*backward)
    fused_moment.forward(q, values, mask, "cosine")
    fused_moment.backward(q, values, mask, "cosine", backward[-1])


def compile_candidate(
    shape: tuple[int, ...], dtype: torch.dtype, shared: bool, backward: bool, config: Config
) -> None:
    """What `sweep` launches for one choice of sizes."""
    B, N, H, P = shape
    q, k = torch.empty(B, N, 2, H, P, dtype=dtype).unbind(2)
    a = [torch.empty(H, P, P) if shared else torch.empty(B, H, P, P)] * 2
    common = [q, k, *a, torch.empty(P, dtype=dtype), None, "cosine", "cosine"]
    if backward:
        gram = torch.empty(B, H, P, P)
        fused_primal.backward(*common, torch.empty(B, N, H, P, dtype=dtype), gram, gram, config)
    else:
        fused_primal.forward(*common, True, True, config)


def compile_all(args: argparse.Namespace) -> None:
    """Fill the cache with all that will be launched; what does not compile is seen later."""
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, initializer=without_gpu) as pool:
        jobs = [
            pool.submit(compile_check, *case, masked) for case in CHECKS for masked in (False, True)
        ]
        for width, dtype in SWEEPS:
            shape = args.batch, args.tokens // args.batch, args.dim // width, width
            for job in product((False, True), candidates(width, dtype)):
                jobs.append(pool.submit(compile_candidate, shape, dtype, args.shared, *job))
        failed = [str(job.exception()).splitlines()[-1:] for job in jobs if job.exception()]
    print(f"compiled for {len(jobs)} calls in {time.monotonic() - start:.0f} s, failed: {failed}")


def timed(run: Callable[[Config | None], object], config: Config | None, device: str) -> float:
    try:
        return milliseconds(lambda: run(config), device)
    except Exception as problem:
        if "out of resource" in str(problem).lower() or "OutOfResources" in type(problem).__name__:
            return float("inf")
        raise


def sweep(
    args: argparse.Namespace, device: str, width: int, dtype: torch.dtype, copy: float
) -> None:
    """Time the candidates, then the best of them with more and fewer programs."""
    N = args.tokens // args.batch
    x = inputs(args.batch, N, args.dim // width, width, dtype, device)
    tensor = x["q"].numel() * x["q"].element_size()
    forward, backward = arguments(x, masked=False, shared=args.shared)
    for name, count, run, in_pieces in (
        (
            "forward",
            3,
            lambda config: fused_primal.forward(*forward, config),
            lambda: forward_in_pieces(*forward),
        ),
        (
            "backward",
            5,
            lambda config: fused_primal.backward(*backward, config),
            lambda: backward_in_pieces(*backward),
        ),
    ):
        rows = []
        deadline = time.monotonic() + args.seconds
        for config in candidates(width, dtype)[: 2 if args.quick else None]:
            if time.monotonic() > deadline:
                print("out of time: the rest of the candidates is left out")
                break
            rows.append((timed(run, config, device), config))
        best = min(rows)[1]
        for programs in (132, 264, 396, 528, 1056, 2112):
            if time.monotonic() < deadline + args.seconds / 2:
                config = best._replace(programs=programs, least=2)
                rows.append((timed(run, config, device), config))
        rows.append((timed(run, None, device), "the table's"))
        best_rows = sorted(rows, key=lambda row: row[0])[: args.rows]
        for ms, config in [*best_rows, (milliseconds(in_pieces, device), "in pieces")]:
            rate = count * tensor / ms / 1e9
            share = f"{rate:5.2f} TB/s {rate / copy:4.0%}"
            print(f"{name} {width} {dtype} {1e3 * ms:8.1f} us {share} {config}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--shared", action="store_true", help="projections without a batch axis")
    parser.add_argument("--seconds", type=float, default=12, help="for one sweep")
    parser.add_argument("--rows", type=int, default=8, help="printed of a sweep")
    parser.add_argument("--quick", action="store_true", help="few shapes and candidates")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    if device == "cuda":
        compile_all(args)
    print("all errors as they should be" if check(device, quick=args.quick) else "ERRORS TOO LARGE")
    one = torch.empty(args.tokens * args.dim * 4, dtype=HALF, device=device)
    other = torch.empty_like(one)
    copy = 2 * one.numel() * 2 / milliseconds(lambda: other.copy_(one), device) / 1e9
    print(f"a plain copy moves {copy:.2f} TB/s")
    for width, dtype in SWEEPS:
        sweep(args, device, width, dtype, copy)


if __name__ == "__main__":
    main()
