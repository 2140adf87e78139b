"""The Long Range Arena: its tasks, generators and prepared files."""

from primal_attention.tasks.lra.listops import ListOpsSettings, make_trees
from primal_attention.tasks.lra.pathfinder import PATHFINDERS, draw_scene
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask
from primal_attention.tasks.lra.sets import LRA, LRA_TASKS, find_lra, load_lra, prepare_lra
from primal_attention.tasks.lra.task import HELD_OUT, LRA_PROTOCOLS, lra_task

__all__ = [
    "HELD_OUT",
    "LRA",
    "LRA_PROTOCOLS",
    "LRA_TASKS",
    "PATHFINDERS",
    "ListOpsSettings",
    "PartSizes",
    "PreparedTask",
    "draw_scene",
    "find_lra",
    "load_lra",
    "lra_task",
    "make_trees",
    "prepare_lra",
]
