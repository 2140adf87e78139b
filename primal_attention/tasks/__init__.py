"""Benchmarks: their cases, losses and metrics."""

from primal_attention.tasks.lra import LRA_PROTOCOLS, LRA_TASKS, find_lra, lra_task, prepare_lra
from primal_attention.tasks.series import LabelledSeries, Series, SeriesEncoding, series_task
from primal_attention.tasks.splits import stratified_split
from primal_attention.tasks.task import (
    CLASSIFICATION,
    REGRESSION,
    Batch,
    Cases,
    Encoding,
    Goal,
    Sizes,
    Task,
)
from primal_attention.tasks.uea import UEA_SETS, find_uea, load_uea, prepare_uea, uea_task

__all__ = [
    "CLASSIFICATION",
    "LRA_PROTOCOLS",
    "LRA_TASKS",
    "REGRESSION",
    "UEA_SETS",
    "Batch",
    "Cases",
    "Encoding",
    "Goal",
    "LabelledSeries",
    "Series",
    "SeriesEncoding",
    "Sizes",
    "Task",
    "find_lra",
    "find_uea",
    "load_uea",
    "lra_task",
    "prepare_lra",
    "prepare_uea",
    "series_task",
    "stratified_split",
    "uea_task",
]
