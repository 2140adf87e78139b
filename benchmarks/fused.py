"""The fused layer beside plain PyTorch on one GPU: errors, and from which size on it is quicker.

    python benchmarks/fused.py [--dim 512] [--heads 8] [--directions 32] [--quick]

For each form of the layer and a list of sizes: the largest error of its outputs and gradients
against float64, over that of plain PyTorch in bfloat16; and the time of an eager forward and
backward pass of both, host included. The size from which on the fused form is quicker belongs in
`LARGE` of `primal_attention/ops/op.py`. On a CPU (with TRITON_INTERPRET=1 and --quick) the same
runs with tiny sizes and times that mean nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from primal_attention import PrimalAttention, ksvd_loss
from primal_attention.ops.op import fused_ops

FORMS: list[dict[str, Any]] = [
    {"weights": "static"},
    {"weights": "static", "causal": True},
    {"weights": "sampled"},
    {"weights": "dual"},
    {"weights": "dual", "causal": True},
]
SIZES = [(1, 128), (8, 128), (8, 512), (16, 1024), (64, 1024), (4, 16384)]  # sequences, tokens


def step(layer: PrimalAttention, x: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the input and of all parameters."""
    leaf = x.detach().requires_grad_()
    y = layer(leaf)
    loss = y.square().mean() + ksvd_loss(layer)
    return [y, *torch.autograd.grad(loss, [leaf, *layer.parameters()])]


def seconds(run: Callable[[], object], device: str) -> float:
    """The median time of a step after a warm-up."""
    times = []
    for number in range(5 if device == "cpu" else 30):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 3:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    pairs = zip(found, exact, strict=True)
    return [float((a.double() - b).norm() / b.norm().clamp(min=1e-300)) for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--directions", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dim, heads, directions = (
        (16, 2, 3) if given.quick else (given.dim, given.heads, given.directions)
    )
    print("form, sequences, tokens, elements, error / plain, fused ms, plain ms")
    for form in FORMS:
        torch.manual_seed(0)
        layer = PrimalAttention(dim, heads, directions, **form).to(device)
        for B, N in [(2, 19)] if given.quick else SIZES:
            x = torch.randn(B, N, dim, device=device)
            with fused_ops("never"):
                exact = step(layer.double(), x.double())
            half = layer.to(torch.bfloat16)
            results, times = [], []
            for when in ("always", "never"):
                with fused_ops(when):
                    results.append(errors(step(half, x.bfloat16()), exact))
                    times.append(1e3 * seconds(partial(step, half, x.bfloat16()), device))
            ratio = max(a / max(b, 1e-9) for a, b in zip(*results, strict=True))
            name = "-".join(map(str, form.values()))
            print(f"{name}, {B}, {N}, {x.numel()}, {ratio:.2f}, {times[0]:.3f}, {times[1]:.3f}")
            layer = layer.float()


if __name__ == "__main__":
    main()
