"""Training: recipes, the loop, checkpoints."""

from primal_attention.training.devices import finish, launch
from primal_attention.training.display import progress_bar
from primal_attention.training.loop import train
from primal_attention.training.progress import Outcome, Watcher
from primal_attention.training.recipe import Recipe
from primal_attention.training.run_directory import read_outcome, train_in

__all__ = [
    "Outcome",
    "Recipe",
    "Watcher",
    "finish",
    "launch",
    "progress_bar",
    "read_outcome",
    "train",
    "train_in",
]
