"""Training: domains, recipes, the loop, checkpoints."""

from primal_attention.training.devices import finish, launch
from primal_attention.training.domains import DOMAINS, find_domain, find_recipe, task_of
from primal_attention.training.domains.domain import Domain
from primal_attention.training.loop import train
from primal_attention.training.model_factory import build_model, trained_model
from primal_attention.training.outcome import Outcome
from primal_attention.training.recipe import Recipe
from primal_attention.training.run_directory import read_outcome, train_in
from primal_attention.training.watchers import Watcher, progress_bar

__all__ = [
    "DOMAINS",
    "Domain",
    "Outcome",
    "Recipe",
    "Watcher",
    "build_model",
    "find_domain",
    "find_recipe",
    "finish",
    "launch",
    "progress_bar",
    "read_outcome",
    "task_of",
    "train",
    "train_in",
    "trained_model",
]
