"""Memory of one training step of the layer on the CPU: kept for the backward pass, and at the peak.

    python benchmarks/memory.py [--tokens 16384] [--dim 512] [--out memory.csv]

Kept: distinct storages that autograd saves, parameters and the input left out. Peak: the highest
sum of live allocations during forward and backward, from the profiler's allocation events. Compared
with the released arithmetic, which keeps the features, both scores and their concatenation; it has
no dual weights, so those rows are compared with its data-dependent (or causal) form.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.benchmarking.layers import ReleasedArithmetic

MIB = 2**20


def saved_bytes(module: nn.Module, x: Tensor, step: Callable[[Tensor], Tensor]) -> int:
    outside = {t.untyped_storage().data_ptr() for t in (*module.parameters(), x)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step(x)
        total = sum(kept.values())  # while the graph, and so every storage, is alive
    del loss
    return total


def peak_bytes(x: Tensor, step: Callable[[Tensor], Tensor]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(x).backward()
    events = profiler.profiler.kineto_results.events()
    live = peak = 0
    for event in sorted(
        (event for event in events if event.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--directions", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    D, H, S, M = options.dim, options.heads, options.directions, 10 * options.directions
    commit = subprocess.check_output(
        ["git", "describe", "--always", "--dirty"], text=True, cwd=Path(__file__).parent
    ).strip()
    made = [0, torch.__version__.split("+")[0], commit]
    x = torch.randn(1, options.tokens, D, requires_grad=True)
    rows = []
    for name, causal, weights in (
        ("sampled", False, "sampled"),
        ("static causal", True, "static"),
        ("dual", False, "dual"),
        ("dual causal", True, "dual"),
    ):
        torch.manual_seed(0)
        ours = PrimalAttention(D, H, S, weights=weights, causal=causal)
        explicit = ReleasedArithmetic(D, H, S, M, causal=causal)

        def our_step(x: Tensor, layer: PrimalAttention = ours) -> Tensor:
            return layer(x).square().mean() + 0.1 * ksvd_loss(layer)

        def explicit_step(x: Tensor, layer: ReleasedArithmetic = explicit) -> Tensor:
            out, objective = layer(x)
            return out.square().mean() + 0.1 * objective

        measured = {}
        for kind, module, step in (("ours", ours, our_step), ("explicit", explicit, explicit_step)):
            step(x).backward()  # gradients exist afterwards, as in the middle of training
            measured[kind] = saved_bytes(module, x, step) / MIB, peak_bytes(x, step) / MIB
        for i, what in enumerate(("kept", "peak")):
            mine, theirs = measured["ours"][i], measured["explicit"][i]
            rows.append((name, options.tokens, D, H, S, what, mine, theirs, mine / theirs, *made))
    sizes = ["tokens", "dim", "heads", "directions"]
    header = [
        "weights",
        *sizes,
        "what",
        "ours_mib",
        "released_mib",
        "ratio",
        "seed",
        "torch",
        "commit",
    ]
    print("  ".join(f"{column:>13}" for column in header))
    for row in rows:
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        print("  ".join(f"{cell:>13}" for cell in cells))
    if options.out:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])


if __name__ == "__main__":
    main()
