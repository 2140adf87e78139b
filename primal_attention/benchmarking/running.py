"""All measurements of a plan, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from primal_attention.benchmarking.crossover import crossover_rows
from primal_attention.benchmarking.measuring import Measurement, measure
from primal_attention.benchmarking.plans import Job, Plan
from primal_attention.benchmarking.results import Results, Row, copy_row, row_of
from primal_attention.benchmarking.timing import measure_copy

LEFT_OUT = "left out: the time was up"


def run_plan(
    plan: Plan,
    results: Results,
    *,
    commit: str,
    device: torch.device | None = None,
    seconds: float | None = None,
    watch: Callable[[Row], None] = lambda row: None,
) -> None:
    """Measure everything of a plan, then the lengths at which it crosses softmax attention.

    Args:
        plan: What to measure.
        results: Where the rows go, each as soon as it is measured.
        commit: Of the code, for every row.
        device: Of the measurements; by default the first GPU, or the CPU.
        seconds: After these no further measurement is begun; the rows say so.
        watch: Called with each row.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = time.monotonic() + (float("inf") if seconds is None else seconds)

    def add(row: Row) -> None:
        results.add([row])
        watch(row)

    copy = measure_copy(device)
    add(copy_row(copy, commit))
    for job in plan.jobs():
        made = _measured(job, device) if time.monotonic() < end else Measurement(note=LEFT_OUT)
        add(row_of(job, made, copy, commit))
    for row in list(crossover_rows(results.rows)):
        add(row)


def _measured(job: Job, device: torch.device) -> Measurement:
    return measure(job.entry, job.sizes, job.kind, device, compiled=job.compiled)
