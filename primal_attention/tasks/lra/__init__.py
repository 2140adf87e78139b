"""The Long Range Arena: its tasks, generators and prepared files."""

from primal_attention.tasks.lra.cache import PartSizes, Prepared, read_prepared, write_prepared
from primal_attention.tasks.lra.listops import ListOpsSettings, make_trees
from primal_attention.tasks.lra.pathfinder import Scene, draw_scene
from primal_attention.tasks.lra.pathfinder_settings import PATHFINDERS, PathfinderSettings
from primal_attention.tasks.lra.protocol import LRA_PROTOCOLS, LraProtocol
from primal_attention.tasks.lra.sources import LRA_TASKS, find_lra, load_lra, prepare_lra
from primal_attention.tasks.lra.task import lra_task

__all__ = [
    "LRA_PROTOCOLS",
    "LRA_TASKS",
    "PATHFINDERS",
    "ListOpsSettings",
    "LraProtocol",
    "PartSizes",
    "PathfinderSettings",
    "Prepared",
    "Scene",
    "draw_scene",
    "find_lra",
    "load_lra",
    "lra_task",
    "make_trees",
    "prepare_lra",
    "read_prepared",
    "write_prepared",
]
