"""A layer against twenty plain lines of PyTorch for the same function, on a CPU.

    python benchmarks/plain.py [--forms sampled dual ...] [--out FILE.csv]

Each case is a training step with the objective, of batch x tokens near 4,096, for dimensions 64 to
512 and 29 to 4,096 tokens. The two sides take turns and the fastest of their turns count, so that
other work on the machine weighs little. Their outputs, objectives and gradients are compared first.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention import PrimalAttention, ksvd_loss

DIMS, LENGTHS, HEADS, S = (64, 128, 256, 512), (29, 128, 512, 1024, 4096), 4, 16
TOKENS = 4096  # of a batch, about
FORMS = {
    "static": {"weights": "static"},
    "sampled": {"weights": "sampled"},
    "dual": {"weights": "dual"},
    "static_causal": {"weights": "static", "causal": True},
    "dual_causal": {"weights": "dual", "causal": True},
}


def plain(layer: PrimalAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and J^2 of the released form, written down without a thought for speed or memory."""
    B, N, D = x.shape
    q, k = (p(x).view(B, N, HEADS, -1).transpose(1, 2) for p in (layer.q_proj, layer.k_proj))
    dual = layer.weights == "dual"
    if layer.causal and not dual:
        count = torch.arange(1, N + 1)[:, None]
        q, k = q.cumsum(2) / count, k.cumsum(2) / count
    phi_q, phi_k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    if dual:
        h_e, h_r = layer.h_proj(x).view(B, N, 2, HEADS, S).permute(2, 0, 3, 1, 4)
        w_e, w_r = phi_k.mT @ h_r / N, phi_q.mT @ h_e / N
    elif layer.weights == "sampled":
        M = layer.num_landmarks
        rows = x[:, torch.arange(M) * (N - 1) // (M - 1)].view(B, M, HEADS, -1).transpose(1, 2)
        w_e, w_r = rows.mT @ layer.w_e, rows.mT @ layer.w_r
    else:
        w_e, w_r = layer.w_e, layer.w_r
    e, r = (
        (scan(phi_q, phi_k, h_r), scan(phi_k, phi_q, h_e))
        if dual and layer.causal
        else (phi_q @ w_e, phi_k @ w_r)
    )
    heads = layer.score_proj(torch.cat((e, r), -1)).transpose(1, 2).reshape(B, N, D)
    if dual and layer.causal:  # the objective is of the weights behind the last token
        e, r = phi_q @ w_e, phi_k @ w_r
    trace = ((w_e if dual else layer.w_e) * (w_r if dual else layer.w_r)).sum((-2, -1))
    energies = (e.square() + r.square()).sum(2) / (2 * N) * layer.lambda_diag.square()
    return layer.out_proj(heads), (energies.sum(-1) - trace).mean(-1).square().mean()


def scan(near: Tensor, far: Tensor, values: Tensor, chunk: int = 128) -> Tensor:
    """Means over the tokens up to each, chunk by chunk."""
    out, state = [], torch.zeros(())
    for a, b, v in zip(*(z.split(chunk, 2) for z in (near, far, values)), strict=True):
        inside = (a @ b.mT).tril() @ v
        out.append(inside + a @ state if state.ndim else inside)
        state = state + b.mT @ v
    return torch.cat(out, 2) / torch.arange(1, near.shape[2] + 1)[:, None]


def ours(layer: PrimalAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute it by the layer."""
    y = layer(x)
    return y, ksvd_loss(layer)


def step(run: Callable[..., tuple[Tensor, Tensor]], layer: PrimalAttention, x: Tensor) -> Tensor:
    layer.zero_grad(set_to_none=True)
    y, objective = run(layer, x)
    loss = y.square().mean() + 0.1 * objective
    loss.backward()
    return loss.detach()


def check(layer: PrimalAttention, x: Tensor) -> None:
    found = []
    for run in (ours, plain):
        loss = step(run, layer, x)
        found.append([loss, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5)


def measure(layer: PrimalAttention, x: Tensor, seconds: float) -> tuple[float, float]:
    """The least time of a step, ours and the plain one, in milliseconds."""
    best, until = [float("inf")] * 2, time.perf_counter() + seconds
    turns = 0
    while time.perf_counter() < until or turns < 4:
        turns += 1
        for which, run in enumerate((ours, plain)):
            start = time.perf_counter()
            step(run, layer, x)
            best[which] = min(best[which], 1e3 * (time.perf_counter() - start))
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each case")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.check_output(command, text=True, cwd=Path(__file__).parent).strip()
    rows, worst = [], 0.0
    for form in options.forms:
        for dim in DIMS:
            for n in LENGTHS:
                torch.manual_seed(0)
                layer = PrimalAttention(dim, HEADS, S, **FORMS[form])
                x = torch.randn(max(1, TOKENS // n), n, dim)
                check(layer, x)
                mine, other = measure(layer, x, options.seconds)
                worst = max(worst, mine / other)
                rows.append(
                    [
                        form,
                        dim,
                        n,
                        len(x),
                        f"{mine:.3f}",
                        f"{other:.3f}",
                        f"{mine / other:.3f}",
                        options.threads,
                        torch.__version__,
                        commit,
                    ]
                )
                print("  ".join(f"{cell!s:>14}" for cell in rows[-1]), flush=True)
    print(f"slowest beside the plain lines: {worst:.2f} times their time")
    if options.out:
        header = [
            "form",
            "dim",
            "tokens",
            "batch",
            "layer_ms",
            "plain_ms",
            "ratio",
            "threads",
            "torch",
            "commit",
        ]
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])


if __name__ == "__main__":
    main()
