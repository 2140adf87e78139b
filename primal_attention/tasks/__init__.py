"""Benchmarks: their cases, losses and metrics."""

from primal_attention.tasks.audio import audio_task
from primal_attention.tasks.images import IMAGE_SETS, find_images, images_task
from primal_attention.tasks.language import (
    LANGUAGE_SETS,
    PERPLEXITY,
    find_language,
    language_task,
    prepare_language,
)
from primal_attention.tasks.lra import LRA_PROTOCOLS, LRA_TASKS, find_lra, lra_task, prepare_lra
from primal_attention.tasks.offline_rl import RL_SETS, find_rl, prepare_rl, rl_task
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
from primal_attention.tasks.uea import UEA_SETS, find_uea, load_uea, uea_task

__all__ = [
    "CLASSIFICATION",
    "IMAGE_SETS",
    "LANGUAGE_SETS",
    "LRA_PROTOCOLS",
    "LRA_TASKS",
    "PERPLEXITY",
    "REGRESSION",
    "RL_SETS",
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
    "audio_task",
    "find_images",
    "find_language",
    "find_lra",
    "find_rl",
    "find_uea",
    "images_task",
    "language_task",
    "load_uea",
    "lra_task",
    "prepare_language",
    "prepare_lra",
    "prepare_rl",
    "rl_task",
    "series_task",
    "stratified_split",
    "uea_task",
]
