"""Compare softmax attention with Primal-Attention on this machine: accuracy, time and memory.

    python examples/demo.py --out out/demo.png

Accuracy: three small classifiers on JapaneseVowels (270 utterances of nine speakers, 12 channels,
7 to 29 time steps, shipped with aeon), three seeds each. A fifth of the training cases chooses the
epoch; the test cases are evaluated once. Time and memory: forward and backward of one layer on one
sequence, up to 16,384 tokens. All of it takes three minutes at most on two cores.
"""

import argparse
import contextlib
import csv
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from primal_attention import build_attention, ksvd_loss
from primal_attention.analysis.plot_style import PALETTE
from primal_attention.tasks.uea import uea_task
from primal_attention.training import launch, progress_bar, train
from primal_attention.training.domains import find_recipe

MIB = 2**20
SETTINGS = ["dim=64", "ffn_dim=128", "num_heads=4", "num_layers=2"]
#   Model and mechanism, label, colour.
MODELS = {
    "softmax": ("softmax", "softmax", PALETTE["vermilion"]),
    "primalformer": ("primal", "Primal, sampled weights", PALETTE["blue"]),
    "primalformer_time": ("primal_time", "Primal, learned time", PALETTE["green"]),
}


class Cost(NamedTuple):
    """Seconds and peak MiB of forward and backward of one layer on one sequence."""

    mechanism: str
    tokens: int
    seconds: float
    peak_mib: float


def main() -> None:
    arguments = parse_arguments()
    accuracies = {name: [] for name in MODELS}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks so small are no faster with more
    fabric = launch(accelerator="cpu", devices=1)
    for seed in range(arguments.seeds):
        task = uea_task("JapaneseVowels", valid=0.2, seed=seed)
        for name, values in accuracies.items():
            recipe = find_recipe("uea/JapaneseVowels", name, "clean", seed)
            recipe = recipe.with_settings([*SETTINGS, f"epochs={arguments.epochs}"])
            values.append(train(recipe, task, fabric, watcher=progress_bar()).value)
    torch.set_num_threads(threads)
    costs = measure(arguments.tokens)
    print_tables(accuracies, costs)
    write_rows(accuracies, costs, arguments.out.with_suffix(".csv"))
    draw(accuracies, costs, arguments.out)
    print(f"{arguments.out} has the picture, {arguments.out.with_suffix('.csv')} the numbers")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384]
    )
    return parser.parse_args()


def measure(lengths: list[int], dim: int = 128, num_heads: int = 4) -> list[Cost]:
    """Time and memory of one layer of each mechanism at each length."""
    costs = []
    for mechanism, _, _ in MODELS.values():
        torch.manual_seed(0)
        layer = build_attention(mechanism, dim, num_heads)
        training_step(layer, torch.randn(1, lengths[0], dim))()  # what only a first call does
        for tokens in lengths:
            step = training_step(layer, torch.randn(1, tokens, dim, requires_grad=True))
            costs.append(Cost(mechanism, tokens, seconds_of(step), peak_of(step) / MIB))
    return costs


def training_step(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward, with the objective where the layer has one."""
    has_objective = hasattr(layer, "lambda_diag")

    def step() -> None:
        loss = layer(x).square().mean()
        if has_objective:
            loss = loss + 0.1 * ksvd_loss(layer)
        loss.backward()

    return step


def seconds_of(step: Callable[[], None]) -> float:
    """The fastest of ten calls, of fewer where they take more than a second together."""
    found = []
    while len(found) < 10 and sum(found) < 1:
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return min(found)


def peak_of(step: Callable[[], None]) -> int:
    """The highest sum of live allocations during a call, in bytes."""
    with silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Keep the log of PyTorch's profiler, which is written in C++, from the terminal."""
    terminal = os.dup(2)
    with Path(os.devnull).open("w") as nothing:
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


def print_tables(accuracies: dict[str, list[float]], costs: list[Cost]) -> None:
    """Accuracy of the models, then time and memory of their layers."""
    tokens = sorted({cost.tokens for cost in costs})
    shown = Table(title="JapaneseVowels, test accuracy (%)")
    for heading in ("attention", "mean", "standard deviation", "seeds"):
        shown.add_column(heading, justify="left" if heading == "attention" else "right")
    for name, values in accuracies.items():
        spread = f"{stdev(values):.1f}" if len(values) > 1 else ""
        shown.add_row(MODELS[name][1], f"{fmean(values):.1f}", spread, str(len(values)))
    layers = Table(title="One layer, forward and backward: milliseconds (peak MiB)")
    layers.add_column("tokens", justify="right")
    for _, label, _ in MODELS.values():
        layers.add_column(label, justify="right")
    for n in tokens:
        own = [cost for cost in costs if cost.tokens == n]
        cells = (f"{1000 * cost.seconds:,.0f} ({cost.peak_mib:.0f})" for cost in own)
        layers.add_row(f"{n:,}", *cells)
    Console().print(shown, layers)


def write_rows(accuracies: dict[str, list[float]], costs: list[Cost], path: Path) -> None:
    """Write one row for each number, with the threads and the version of PyTorch."""
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    rows = [
        {"what": "accuracy", "attention": MODELS[name][0], "seed": seed, "value": value, **machine}
        for name, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    for cost in costs:
        where = {"attention": cost.mechanism, "tokens": cost.tokens}
        rows.append({"what": "seconds", **where, "value": cost.seconds, **machine})
        rows.append({"what": "peak_mib", **where, "value": cost.peak_mib, **machine})
    columns = ["what", "attention", "seed", "tokens", "value", "threads", "torch"]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def draw(accuracies: dict[str, list[float]], costs: list[Cost], path: Path) -> None:
    """Accuracy of each seed, time against length, memory against length."""
    mpl.use("Agg")
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, values in accuracies.items():
        _, label, colour = MODELS[name]
        left.plot(values, [label] * len(values), "o", color=colour, alpha=0.6)
        left.plot([fmean(values)], [label], "|", color=colour, markersize=22)
    left.set_title("JapaneseVowels")
    left.set_xlabel("test accuracy (%) of each seed; bar: mean")
    left.margins(y=0.4)
    left.invert_yaxis()
    for mechanism, label, colour in MODELS.values():
        own = [cost for cost in costs if cost.mechanism == mechanism]
        tokens = [cost.tokens for cost in own]
        style = {"color": colour, "marker": ".", "label": label}
        middle.plot(tokens, [cost.seconds for cost in own], **style)
        right.plot(tokens, [cost.peak_mib for cost in own], **style)
    label_axes(middle, "one layer, forward and backward", "seconds")
    label_axes(right, "peak memory", "MiB")
    figure.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def label_axes(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    axes.set_xlabel("tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({int(x) for line in axes.lines for x in line.get_xdata()})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=30)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


if __name__ == "__main__":
    main()
