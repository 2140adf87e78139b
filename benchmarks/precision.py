"""Error of every mechanism in float32, bfloat16 and float16 against float64.

    python benchmarks/precision.py [MECHANISM ...] [--out FILE.csv]

Each layer is built once and moved to the precision; the same input, mask and output gradient go
through it. The error is |a - b| / |b| over all real tokens (outputs, input gradients) and over all
parameters (parameter gradients). The file is written anew after each row, and rows of it that have
not been measured again stay.
"""

from __future__ import annotations

import argparse
import copy
import csv
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from primal_attention import ATTENTIONS

B, N, D, H = 4, 512, 128, 4


def run(layer: nn.Module, x: Tensor, mask: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = next(layer.parameters()).dtype
    x = x.detach().to(dtype).requires_grad_()
    y = layer(x, token_mask=mask)
    y.backward(grad.to(dtype))
    assert x.grad is not None
    parameters = [p.grad.double().flatten() for p in layer.parameters() if p.grad is not None]
    return y.detach().double(), x.grad.double(), torch.cat(parameters)


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def builds(names: Iterable[str]) -> list[tuple[str, bool, dict[str, object]]]:
    rows: list[tuple[str, bool, dict[str, object]]] = []
    for name in names:
        kind = ATTENTIONS[name]
        for causal in (False, True):
            if name == "primal":
                for weights in ("static", "dual") if causal else ("sampled", "dual"):
                    rows.append((name, causal, {"weights": weights}))
            elif not causal or kind.mechanism.causal:
                rows.append((name, causal, {}))
    return rows


def read(path: Path | None) -> dict[tuple[str, ...], list[object]]:
    """Rows of a file, if there is one, by what was measured."""
    if path is None or not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return {tuple(row[:4]): [*row[4:]] for row in rows}


def write(path: Path, rows: list[list[object]]) -> None:
    """In one step, so that a run that is killed leaves what it has."""
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mechanisms", nargs="*", metavar="MECHANISM", help="defaults to all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default=None, help="defaults to the checkout's")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    commit = (
        options.commit
        or subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], text=True, cwd=Path(__file__).parent
        ).strip()
    )
    name_of_device = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    made = [0, name_of_device, torch.__version__.split("+")[0], commit]
    header = ["mechanism", "options", "causal", "dtype", "output", "input_grad", "parameter_grad"]
    header += ["seed", "device", "torch", "commit"]
    rows = read(options.out)
    for name, causal, extra in builds(options.mechanisms or ATTENTIONS):
        torch.manual_seed(0)
        layer = ATTENTIONS[name](D, H, causal=causal, **extra).to(device).eval()
        x, grad = torch.randn(2, B, N, D, device=device, dtype=torch.float64)
        lengths = torch.tensor([N, N - 57, N // 2, N // 5], device=device)
        mask = torch.arange(N, device=device) < lengths[:, None]
        exact = run(copy.deepcopy(layer).double(), x, mask, grad)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            got = run(copy.deepcopy(layer).to(dtype), x, mask, grad)
            errors = [f"{relative_error(a, b):.2e}" for a, b in zip(got, exact, strict=True)]
            choice = " ".join(f"{key}={value}" for key, value in extra.items())
            case = name, choice, str(causal), str(dtype).removeprefix("torch.")
            rows[case] = [*errors, *made]
            print("  ".join(f"{cell!s:>16}" for cell in (*case, *rows[case])), flush=True)
            if options.out:
                write(options.out, [header, *([*key, *cells] for key, cells in rows.items())])


if __name__ == "__main__":
    main()
