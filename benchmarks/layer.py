"""Time and memory of one attention layer, forward and forward + backward with its objective.

    python benchmarks/layer.py [--tokens 1024 4096] [--total 65536] [--dtype bfloat16] [--out DIR]

On a GPU the time is that of a replayed graph where the layer can be captured (launch overhead left
out), beside the wall time of eager calls; on a CPU both columns hold the wall time. Rows: the bare
projections (one Linear(D, 2D) and one Linear(D, D), the floor), softmax attention through SDPA, the
released arithmetic, and Primal-Attention with each kind of weights; with --all the other mechanisms
of the registry instead (not a number where one does not fit the memory or cannot be captured).
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from released_arithmetic import ReleasedArithmetic
from torch import Tensor, nn

from primal_attention import ATTENTIONS, PrimalAttention, ksvd_loss, record_ksvd

ETA = 0.1
Step = Callable[[Tensor], tuple[Tensor, ...]]  # all that has a gradient: outputs, the objective


class Entry(NamedTuple):
    mechanism: str
    weights: str
    causal: bool
    module: nn.Module
    step: Step


class Projections(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.qk_proj, self.out_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.qk_proj(x), self.out_proj(x)


class Softmax(nn.Module):
    def __init__(self, dim: int, num_heads: int, *, causal: bool):
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(out.transpose(1, 2).flatten(2))


def registered(dim: int, heads: int, n: int) -> list[Entry]:
    """The other mechanisms of the registry with default options, bidirectional and causal."""
    bounded = {"max_tokens": n}
    options = {"linformer": bounded, "reformer": bounded, "cosformer": bounded}
    rows = []
    for name, kind in ATTENTIONS.items():
        if name in ("primal", "softmax"):
            continue
        for causal in (False, True) if kind.mechanism.causal else (False,):
            layer = kind(dim, heads, causal=causal, **options.get(name, {}))
            rows.append(Entry(name, "", causal, layer, lambda x, layer=layer: (layer(x),)))
    return rows


def entries(dim: int, heads: int, directions: int) -> list[Entry]:
    projections = Projections(dim)
    rows = [Entry("projections", "", False, projections, projections)]
    for causal in (False, True):
        softmax = Softmax(dim, heads, causal=causal)
        rows.append(Entry("softmax", "", causal, softmax, lambda x, layer=softmax: (layer(x),)))
        released = ReleasedArithmetic(dim, heads, directions, 10 * directions, causal=causal)
        weights = "static" if causal else "sampled"
        rows.append(Entry("released", weights, causal, released, released))
    for weights, causal in (
        ("static", False),
        ("sampled", False),
        ("dual", False),
        ("static", True),
        ("dual", True),
    ):
        layer = PrimalAttention(dim, heads, directions, weights=weights, causal=causal)

        def step(x: Tensor, layer: PrimalAttention = layer) -> tuple[Tensor, Tensor]:
            with record_ksvd(layer):  # lets go of the graph of the last step before this one
                return layer(x), ksvd_loss(layer)

        rows.append(Entry("primal", weights, causal, layer, step))
    return rows


def runner(entry: Entry, x: Tensor, *, backward: bool) -> Callable[[], None]:
    def forward_only() -> None:
        with torch.no_grad():
            entry.module(x)

    with torch.enable_grad():
        outputs = entry.step(x)
    grads = [torch.randn_like(y) if y.ndim else torch.full_like(y, ETA) for y in outputs]

    def both() -> None:
        torch.autograd.backward(entry.step(x), grads)

    return both if backward else forward_only


def median_ms(run: Callable[[], None], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def graph_ms(run: Callable[[], None], repeats: int) -> float:
    """GPU time of one run by replaying a captured graph; nan where capture is not possible."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError as error:
        print(f"not captured: {error}".splitlines()[0])
        torch.cuda.synchronize()
        return float("nan")
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(entry: Entry, x: Tensor, *, backward: bool, repeats: int) -> tuple[float, float, float]:
    """GPU milliseconds, wall milliseconds and peak MiB."""
    entry.module.train()
    run = runner(entry, x, backward=backward)
    entry.module.train(backward)
    for _ in range(2):
        run()
    if x.device.type != "cuda":
        wall = median_ms(run, x.device, repeats)
        return wall, wall, float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    wall = median_ms(run, x.device, repeats)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return graph_ms(run, repeats), wall, peak


def card_name(device: torch.device) -> str:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine() + "-cpu"
    return name.replace("NVIDIA ", "").replace(" ", "-").lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--total", type=int, default=65536, help="tokens in the whole batch")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--directions", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--all", action="store_true", help="the other mechanisms instead")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", default=None, help="defaults to the checkout's")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    commit = (
        options.commit
        or subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], text=True, cwd=Path(__file__).parent
        ).strip()
    )
    sizes = [options.dim, options.heads, options.directions, options.dtype]
    header = "mechanism,weights,causal,n,batch,dim,heads,directions,dtype,pass,gpu_ms,wall_ms"
    rows = []
    for n in options.tokens:
        batch = max(options.total // n, 1)
        torch.manual_seed(0)
        x = torch.randn(batch, n, options.dim, device=device, dtype=dtype, requires_grad=True)
        chosen = entries(options.dim, options.heads, options.directions)
        if options.all:
            chosen = registered(options.dim, options.heads, n)
        for entry in chosen:
            entry.module.to(device, dtype)
            for kind in ("fwd", "fwd+bwd"):
                try:
                    times = measure(entry, x, backward=kind == "fwd+bwd", repeats=options.repeats)
                except torch.OutOfMemoryError:
                    times = (float("nan"),) * 3
                    torch.cuda.empty_cache()
                name = [entry.mechanism, entry.weights, entry.causal, n, batch, *sizes, kind]
                rows.append([*name, *(f"{value:.4g}" for value in times), commit])
                print("  ".join(f"{cell!s:>11}" for cell in rows[-1]), flush=True)
    if options.out:
        date = datetime.datetime.now(datetime.UTC).date()
        torch_version = torch.__version__.split("+")[0]
        path = options.out / f"{card_name(device)}_torch{torch_version}_{date}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([[*header.split(","), "peak_mib", "commit"], *rows])


if __name__ == "__main__":
    main()
