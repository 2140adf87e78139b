"""Measure what BN and SH cost: time, memory and operations of one layer, forward and backward.

    python reproduction/primal_dual/attention_bn_sh/cost.py --tokens 1024 4096 16384 65536

65,536 tokens in all, dimension 512, 8 heads. Softmax attention is measured fused, and spelled out
(``math``) where its weights fit. Operations are counted by formula: projections, scores and what is
read with them, forward alone. Rows go to cost.csv.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from primal_attention import build_attention
from primal_attention.atomic_files import write_rows
from primal_attention.training.devices import device_name
from primal_attention.training.results import current_commit

HERE = Path(__file__).parent
DIM, HEADS, SCALES = 512, 8, [1, 1, 2, 2, 4, 4, 8, 8]
LAYERS: dict[str, tuple[str, dict[str, object]]] = {
    "softmax": ("softmax", {}),
    "softmax_bn": ("softmax_bn", {}),
    "softmax_sh": ("softmax_sh", {}),
    "softmax_bn_sh": ("softmax_bn_sh", {}),
    "linear": ("linear", {}),
    "linear_bn": ("linear_bn", {}),
    "linear_sh": ("linear", {"scales": SCALES}),
    "linear_bn_sh": ("linear_bn", {"scales": SCALES}),
}
MOST_SPELLED_OUT = 4096  # tokens
REPEATS = 10
Row = dict[str, object]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--total", type=int, default=65536, help="tokens in a batch")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for cost.csv")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for row in measured(arguments.tokens, arguments.total):
        rows.append(row)
        print(*row.values(), flush=True)
        write_rows(arguments.out / "cost.csv", rows)


def measured(lengths: list[int], total: int) -> Iterator[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for tokens in lengths:
        x = torch.randn(max(total // tokens, 1), tokens, DIM, device=device, dtype=torch.bfloat16)
        for name, (mechanism, options) in LAYERS.items():
            for backend in backends(name, tokens):
                layer = build_attention(mechanism, DIM, HEADS, **options).to(x)
                with sdpa_kernel(backend):
                    milliseconds, peak = cost(layer, x)
                yield {
                    "mechanism": name,
                    "backend": "math" if backend == [SDPBackend.MATH] else "fused",
                    "tokens": tokens,
                    "batch": len(x),
                    "ms": f"{milliseconds:.3f}",
                    "peak_mib": f"{peak:.1f}",
                    "gflop": f"{len(x) * operations(name, tokens) / 1e9:.2f}",
                    "device": device_name(device),
                    "torch": torch.__version__,
                    "commit": current_commit(),
                }


def backends(name: str, tokens: int) -> Iterator[list[SDPBackend]]:
    yield [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if name.startswith("softmax") and tokens <= MOST_SPELLED_OUT:
        yield [SDPBackend.MATH]


def cost(layer: nn.Module, x: Tensor) -> tuple[float, float]:
    """Milliseconds, and MiB beyond what the layer and its input hold (0 on a CPU)."""
    x = x.clone().requires_grad_()

    def work() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        layer(x).sum().backward()

    for _ in range(3):
        work()
    if not x.is_cuda:
        return timed(work, lambda: None), 0.0
    layer.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    work()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**20
    return timed(work, torch.cuda.synchronize), peak


def timed(work: Callable[[], None], finish: Callable[[], None]) -> float:
    """The median of some repeats, in milliseconds."""
    times = []
    for _ in range(REPEATS):
        finish()
        began = time.perf_counter()
        work()
        finish()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def operations(name: str, tokens: int) -> float:
    """Multiplications and additions of one sequence, forward."""
    channels = DIM // HEADS
    keys = sum(tokens / scale for scale in (SCALES if name.endswith("sh") else [1] * HEADS))
    projections = 4 * 2 * tokens * DIM**2
    if name.startswith("softmax"):
        return projections + 4 * tokens * keys * channels
    return projections + 2 * (keys + tokens * HEADS) * channels * (channels + 1)


if __name__ == "__main__":
    main()
