"""Print the tables of numbers of README.md from the rows of our runs and measurements.

    python docs/make_readme_tables.py

A test fails where the README has other tables. An accuracy is the mean over the seeds of each set,
and of these over the sets; rows of other protocols and models are left out.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "reproduction/primal_attention"
TIMES = ROOT / "benchmarks/results/h200_torch2.11.0_2026-11-16.csv"
LENGTHS = ("1024", "4096", "16384", "65536")
LAYERS = {  # mechanism, weights, causal
    ("projections", "", "False"): "projections alone",
    ("softmax", "", "False"): "softmax attention (SDPA)",
    ("primal", "sampled", "False"): "Primal, sampled weights",
    ("primal", "dual", "True"): "Primal, dual weights, causal",
}
MODELS = {
    "softmax": "softmax",
    "linear": "linear",
    "primalformer": "Primal, all layers",
    "primal_plus": "Primal, last layer",
}


class Task(NamedTuple):
    """A line of the table."""

    name: str
    folder: str
    sets: tuple[str, ...]
    unit: str
    remark: str


UEA = ("JapaneseVowels", "UWaveGestureLibrary", "Handwriting")
TASKS = [
    Task(
        "five sets of time series",
        "table1_uea",
        (*UEA, "SelfRegulationSCP1", "SelfRegulationSCP2"),
        "accuracy",
        "5 seeds",
    ),
    Task("long text, 4,000 bytes", "table2_lra", ("text",), "accuracy", "1 seed"),
    Task("images as 1,024 pixels", "table2_lra", ("image",), "accuracy", "1 seed"),
    Task(
        "Tiny-ImageNet, 100 classes", "table5_images", ("tiny-imagenet-100",), "accuracy", "1 seed"
    ),
    Task("WikiText-2", "language", ("wikitext-2",), "perplexity", "1 seed"),
]


def cell(task: Task, model: str) -> str:
    """The mean of the rows of the clean protocol, empty where a set has none."""
    found = defaultdict(list)
    with (ROWS / task.folder / "results.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["protocol"], row["metric"]) == (model, "clean", task.unit):
                found[row["dataset"]].append(float(row["value"]))
    if not all(found[name] for name in task.sets):
        return ""
    return f"{fmean(fmean(found[name]) for name in task.sets):.1f}"


def speed() -> str:
    """Milliseconds of the GPU and the peak of the memory, by the length of a sequence."""
    with TIMES.open(newline="") as file:
        rows = {
            (row["mechanism"], row["weights"], row["causal"], row["n"]): row
            for row in csv.DictReader(file)
            if (row["pass"], row["dtype"]) == ("fwd+bwd", "bfloat16")
        }
    heads = " | ".join(f"{int(n):,}" for n in LENGTHS)
    lines = [f"| tokens of a sequence | {heads} | peak memory |", f"|---|{'--:|' * 5}"]
    for layer, name in LAYERS.items():
        mine = [rows[(*layer, n)] for n in LENGTHS]
        peaks = sorted(round(float(row["peak_mib"])) for row in mine)
        peak = f"{peaks[0]} MiB" if peaks[0] == peaks[-1] else f"{peaks[0]} to {peaks[-1]} MiB"
        times = " | ".join(f"{float(row['gpu_ms']):.2f}" for row in mine)
        lines.append(f"| {name} | {times} | {peak} |")
    return "\n".join(lines) + "\n"


def accuracy() -> str:
    """The mean of each model on each task."""
    lines = [
        f"| clean protocol | | {' | '.join(MODELS.values())} | |",
        f"|---|---|{'--:|' * 4}---|",
    ]
    for task in TASKS:
        cells = " | ".join(cell(task, model) for model in MODELS)
        lines.append(f"| {task.name} | {task.unit} | {cells} | {task.remark} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(speed(), accuracy(), sep="\n", end="")
