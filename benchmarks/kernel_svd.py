"""Time, memory and accuracy of `KernelSVD` on the kernel matrix of two real sets of points.

X holds patches of one of scikit-learn's two sample pictures and Z patches of the other: 8 x 8 grey
pixels, each patch at zero mean and unit contrast. Two kernels: the RBF kernel with the median
heuristic, and exp(<W_q x, W_k z> / sqrt(d)) with random W_q and W_k, asymmetric, given as a
function. Every fit runs in a process of its own, so that its peak memory is its own. The errors
are those of the singular values against a reference written here: a streamed randomised SVD in
float64 with four times as many spare columns, and both of its passes separate.

    python benchmarks/kernel_svd.py --points 20000 --out kernel_svd.csv
"""

import argparse
import csv
import math
import multiprocessing
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor

from primal_attention.theory import RBF, KernelSVD

PATCH = 8
BLOCK = 1000  # rows of the reference's kernel matrix held at a time
SOLVERS: dict[str, dict[str, Any]] = {
    "nystrom": {"solver": "nystrom"},
    "randomized": {"solver": "randomized"},
    "plain nystrom": {"solver": "nystrom", "n_iter": 0},
}
KernelFunction = Callable[[Tensor, Tensor], Tensor]


class Fit(NamedTuple):
    """One measured fit."""

    seconds: float
    peak_mib: float
    singular_values: Tensor


def load_patches(num_points: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random patches of the two pictures, float32, [num_points, PATCH^2] each."""
    rng = np.random.default_rng(seed)
    sets = []
    for picture in load_sample_images().images:
        grey = picture.mean(axis=2) / 255
        windows = np.lib.stride_tricks.sliding_window_view(grey, (PATCH, PATCH))
        windows = windows.reshape(-1, PATCH**2)
        patches = windows[rng.choice(len(windows), num_points, replace=False)]
        patches = patches - patches.mean(axis=1, keepdims=True)
        contrast = np.sqrt(patches.var(axis=1, keepdims=True) + 1e-3)  # flat patches stay small
        sets.append(torch.tensor(patches / contrast, dtype=torch.float32))
    return sets[0], sets[1]


def median_gamma(X: Tensor, Z: Tensor) -> float:
    return 1 / torch.cdist(X[:1000], Z[:1000]).square().median().item()


def projections(X: Tensor, Z: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Random W_q and W_k, scaled so that the attention scores have unit variance."""
    generator = torch.Generator().manual_seed(seed)
    w_q, w_k = torch.randn(2, X.shape[1], X.shape[1], generator=generator)
    spread = ((X[:1000] @ w_q.T) @ (Z[:1000] @ w_k.T).T / math.sqrt(X.shape[1])).std()
    return w_q / spread.sqrt(), w_k / spread.sqrt()


def attention_kernel(w_q: Tensor, w_k: Tensor) -> KernelFunction:
    def kernel(X: Tensor, Z: Tensor) -> Tensor:
        return ((X @ w_q.T) @ (Z @ w_k.T).T).div_(math.sqrt(X.shape[1])).exp_()

    return kernel


def measured_kernel(name: str, X: Tensor, Z: Tensor, seed: int) -> RBF | KernelFunction:
    if name == "rbf":
        return RBF(median_gamma(X, Z))
    return attention_kernel(*projections(X, Z, seed))


def measure_fit(name: str, solver: str, args: argparse.Namespace) -> Fit:
    """Fit in this process, which does nothing else."""
    torch.set_num_threads(args.threads)
    X, Z = load_patches(args.points, args.seed)
    kernel = measured_kernel(name, X, Z, args.seed)
    options = {**SOLVERS[solver], "random_state": args.seed}
    start = time.perf_counter()
    model = KernelSVD(args.directions, kernel=kernel, **options).fit(X, Z=Z)
    seconds = time.perf_counter() - start
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Fit(seconds, peak_kib / 1024, torch.as_tensor(model.singular_values_))


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """A process starts with the peak memory of its parent, so the parent must stay small."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def reference_blocks(name: str, X: Tensor, Z: Tensor, seed: int) -> Iterator[Tensor]:
    """Rows of the kernel matrix in float64, by formulas that share nothing with the package."""
    gamma, (w_q, w_k) = median_gamma(X, Z), projections(X, Z, seed)
    X, Z = X.double(), Z.double()
    z_norms, keys = Z.square().sum(1), Z @ w_k.double().T / math.sqrt(Z.shape[1])
    for rows in X.split(BLOCK):
        if name == "rbf":
            distances = rows.square().sum(1)[:, None] + z_norms - 2 * rows @ Z.T
            yield distances.mul_(-gamma).exp_()
        else:
            yield (rows @ w_q.double().T @ keys.T).exp_()


def reference_singular_values(name: str, args: argparse.Namespace) -> Tensor:
    """The randomised range finder with power steps and separate passes, in float64."""
    torch.set_num_threads(args.threads)
    X, Z = load_patches(args.points, args.seed)

    def times(columns: Tensor) -> Tensor:
        blocks = reference_blocks(name, X, Z, args.seed)
        return torch.cat([block @ columns for block in blocks])

    def transposed_times(columns: Tensor) -> Tensor:
        total = torch.zeros(len(Z), columns.shape[1], dtype=columns.dtype)
        blocks = reference_blocks(name, X, Z, args.seed)
        for block, part in zip(blocks, columns.split(BLOCK), strict=True):
            total += block.T @ part
        return total

    generator = torch.Generator().manual_seed(args.seed + 1)
    spare = 4 * KernelSVD().oversampling
    basis = torch.randn(len(Z), args.directions + spare, generator=generator, dtype=torch.float64)
    for _ in range(args.reference_steps):
        image = torch.linalg.qr(times(basis)).Q
        basis = torch.linalg.qr(transposed_times(image)).Q
    return torch.linalg.svdvals(times(basis))[: args.directions]


def current_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def measure_kernel(name: str, args: argparse.Namespace) -> Iterator[dict[str, str]]:
    """One row of the table for every solver."""
    reference = in_new_process(reference_singular_values, name, args)
    for solver in SOLVERS:
        fit: Fit = in_new_process(measure_fit, name, solver, args)
        error = (fit.singular_values.double() / reference - 1).abs().max()
        yield {
            "kernel": name,
            "solver": solver,
            "points": str(args.points),
            "directions": str(args.directions),
            "sigma_ratio": f"{reference[-1] / reference[0]:.4f}",
            "seconds": f"{fit.seconds:.1f}",
            "peak_mib": f"{fit.peak_mib:.0f}",
            "max_error": f"{error:.2e}",
            "threads": str(args.threads),
            "torch": torch.__version__,
            "commit": current_commit(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=20_000, help="patches of each picture")
    parser.add_argument("--directions", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference-steps", type=int, default=8, help="power steps")
    parser.add_argument("--out", type=Path, help="also write the table as CSV")
    args = parser.parse_args()
    rows: list[dict[str, str]] = []
    for name in ("rbf", "attention"):
        for row in measure_kernel(name, args):
            for line in [row.values()] if rows else [row.keys(), row.values()]:
                print(*(f"{cell:>13}" for cell in line), flush=True)
            rows.append(row)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
