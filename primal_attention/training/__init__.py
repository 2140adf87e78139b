"""Training: recipes, the loop, checkpoints."""

from primal_attention.training.devices import launch
from primal_attention.training.loop import Outcome, Watcher, train
from primal_attention.training.recipe import Recipe

__all__ = ["Outcome", "Recipe", "Watcher", "launch", "train"]
