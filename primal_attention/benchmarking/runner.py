"""All measurements of a plan, one after the other."""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from primal_attention.benchmarking.clocks import measure_copy
from primal_attention.benchmarking.measurement import Measurement, measure, median, reason
from primal_attention.benchmarking.presets import Job, MeasurementPlan
from primal_attention.benchmarking.registry import ENTRIES, LayerSizes
from primal_attention.benchmarking.results import Results, Row, copy_row, crossover_rows, row_of

LEFT_OUT = "left out: the time was up"


def run_plan(
    plan: MeasurementPlan,
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
    measured: dict[Job, list[Measurement]] = {job: [] for job in plan.jobs()}
    for _ in range(plan.rounds or 1):
        for job, runs in measured.items():
            if runs and (runs[0].note or time.monotonic() >= end):
                continue
            in_time = time.monotonic() < end
            made = _measured_apart if plan.rounds else _measured
            runs.append(made(job, device) if in_time else Measurement(note=LEFT_OUT))
            add(row_of(job, median(runs), copy, commit))
    for row in list(crossover_rows(results.rows)):
        add(row)


def _measured(job: Job, device: torch.device) -> Measurement:
    return measure(job.entry, job.sizes, job.kind, device, compiled=job.compiled)


def _measured_apart(job: Job, device: torch.device) -> Measurement:
    """Measure in a process of its own: memory that others freed affects times."""
    named = job.entry.name, job.sizes, job.kind, job.compiled, device
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_measured_by_name, *named).result()
    except BrokenProcessPool as error:
        return Measurement(note=reason(error))


def _measured_by_name(
    name: str, sizes: LayerSizes, kind: str, compiled: bool, device: torch.device
) -> Measurement:
    return _measured(Job(ENTRIES[name], sizes, kind, compiled), device)
