"""Plans of measurements, the most wanted first, for runs that are cut short; and their runs."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context

import torch

from primal_attention.benchmarking.clocks import measure_copy
from primal_attention.benchmarking.measurement import Measurement, measure, median, reason
from primal_attention.benchmarking.registry import BOTH, ENTRIES, Job, LayerSizes, find_entries
from primal_attention.benchmarking.results import Results, copy_row, crossover_rows, row_of
from primal_attention.training.results import Row

MILLION = 1_048_576
LEFT_OUT = "left out: the time was up"
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_LENGTHS = (256, 1024, 4096, 16384, 65536)
_PRIMAL = ("primal-static", "primal-sampled", "primal-dual")
_CAUSAL = ("primal-static-causal", "primal-dual-causal")
_TIME = ("primal_time", "primal_time-causal")
_DECODING = ("softmax-causal", *_CAUSAL, "primal_time-causal")
_SMALL = ("projections", "softmax", *_PRIMAL, *_CAUSAL)
_OTHERS = tuple(
    name
    for name, entry in ENTRIES.items()
    if entry.mechanism not in ("projections", "softmax", "primal", "primal_time", "released")
    and not entry.alone
)


@dataclass(frozen=True)
class Stage:
    """Entries at some lengths, one pass after the other."""

    entries: tuple[str, ...]
    lengths: tuple[int, ...] | None = None  # those of the plan
    passes: tuple[str, ...] = (BOTH,)
    compiled: bool = False
    batches: tuple[int, ...] | None = None  # for these lengths; by default what the total leaves


@dataclass(frozen=True)
class MeasurementPlan:
    """Stages, and the sizes that they have in common; all combinations of these are measured."""

    stages: tuple[Stage, ...]
    lengths: tuple[int, ...] = _LENGTHS
    total: tuple[int, ...] = (65536,)  # tokens in a batch; a longer sequence is alone in its own
    dim: tuple[int, ...] = (512,)
    heads: tuple[int, ...] = (8,)
    directions: tuple[int, ...] = (32,)
    dtype: tuple[str, ...] = ("bfloat16",)
    rounds: int | None = None  # through all of it, each time in a new process; medians count

    def jobs(self) -> Iterator[Job]:
        """Everything to be measured."""
        for stage in self.stages:
            for total, n, *sizes in product(
                self.total,
                stage.lengths or self.lengths,
                self.dim,
                self.heads,
                self.directions,
                self.dtype,
            ):
                batches = stage.batches or (max(total // n, 1),)
                for batch, name, kind in product(batches, stage.entries, stage.passes):
                    shape = LayerSizes(n, batch, *sizes)  # type: ignore[arg-type]
                    yield Job(name, shape, kind, stage.compiled)


PRESETS: dict[str, MeasurementPlan] = {
    # What the project promises of one large GPU, in about 100 seconds.
    "headline": MeasurementPlan(
        (
            Stage(("projections", "softmax", *_PRIMAL, "released-sampled", *_CAUSAL)),
            Stage(("primal_op-sampled", "primal_op-static"), (1024, 65536), ("fwd", "bwd")),
            Stage(("softmax",), compiled=True),
            Stage(("primal-sampled",), (MILLION,)),
            Stage(("projections", "softmax", *_PRIMAL, *_CAUSAL), passes=("fwd",)),
            Stage(("softmax-causal",), passes=("fwd", BOTH)),
            Stage(("primal-sampled", "primal-static", "primal-dual"), (1024,), compiled=True),
        )
    ),
    # What an eager or compiled step of little work costs the host, and one step of decoding.
    "host": MeasurementPlan(
        (
            Stage((*_SMALL, *_TIME), (128,), (BOTH, "fwd"), batches=(1,)),
            Stage((*_SMALL, *_TIME), (512,), batches=(8,)),
            Stage(_DECODING, (8192,), ("step", "decode"), batches=(1, 64)),
            Stage((*_SMALL, *_TIME), (128,), compiled=True, batches=(1,)),
            Stage((*_SMALL, *_TIME), (512,), compiled=True, batches=(8,)),
        )
    ),
    # Layers whose kernel has a learned time, and linear attention beside them.
    "time": MeasurementPlan(
        (
            Stage((*_TIME, "softmax", "softmax-causal", "linear-causal"), (1024, 16384)),
            Stage(("softmax", "softmax-causal"), (1024, 16384), compiled=True),
            Stage(("primal_time", "primal_time-causal"), (MILLION,)),
        )
    ),
    # Everything else that can be timed.
    "mechanisms": MeasurementPlan((Stage(_OTHERS, passes=(BOTH, "fwd")),), (1024, 4096, 16384)),
    # Training on a CPU against the released arithmetic.
    "cpu": MeasurementPlan(
        (
            Stage(("projections", "released-sampled", *_PRIMAL)),
            Stage(("released-static-causal", *_CAUSAL)),
        ),
        (4096,),
        (4096,),
        dtype=("float32",),
        rounds=5,  # a shared CPU is not as fast from one minute to the next
    ),
    # A look that takes seconds anywhere.
    "small": MeasurementPlan(
        (
            Stage(
                ("projections", "softmax", *_PRIMAL, *_CAUSAL, "released-sampled"),
                passes=(BOTH, "fwd"),
            ),
            Stage(("primal_op-sampled",), passes=("fwd", "bwd")),
        ),
        (64, 256, 1024),
        (1024,),
        (64,),
        (4,),
        (8,),
        ("float32",),
    ),
}


def plan_of(
    preset: str,
    mechanisms: Sequence[str] = (),
    *,
    compiled: bool = False,
    **sizes: Sequence[int] | Sequence[str] | None,
) -> MeasurementPlan:
    """Return a preset with the given sizes, or chosen mechanisms with the preset's sizes.

    Args:
        preset: One of ``PRESETS``.
        mechanisms: Names of the registry; none for those of the preset.
        compiled: Chosen mechanisms are timed with ``torch.compile`` as well.
        sizes: Values for the fields of :class:`MeasurementPlan`; nothing keeps the preset's.
    """
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; one of {', '.join(PRESETS)}")
    plan = PRESETS[preset]
    given = {name: tuple(values) for name, values in sizes.items() if values}
    for name, values in given.items():
        for value in values:
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            if name == "dtype" and value not in _DTYPES:
                raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {value!r}")
    plan = replace(plan, **given)  # type: ignore[arg-type]
    if not mechanisms:
        return plan
    names = tuple(find_entries(mechanisms))
    ops = tuple(name for name in names if ENTRIES[name].alone)
    layers = tuple(name for name in names if name not in ops)
    stages = [Stage(layers, passes=(BOTH, "fwd")), Stage(ops, passes=("fwd", "bwd"))]
    if compiled:
        stages.append(Stage(layers, compiled=True))
    return replace(plan, stages=tuple(stage for stage in stages if stage.entries))


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
        results.add(row)
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
    return measure(ENTRIES[job.name], job.sizes, job.kind, device, compiled=job.compiled)


def _measured_apart(job: Job, device: torch.device) -> Measurement:
    """Measure in a process of its own: memory that others freed affects times."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(_measured, job, device).result()
    except BrokenProcessPool as error:
        return Measurement(note=reason(error))
