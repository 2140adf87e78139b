"""A trained model and what it takes to use it, from a checkpoint."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from primal_attention.tasks import SeriesEncoding, Sizes
from primal_attention.training.building import build_model
from primal_attention.training.checkpoint import read_checkpoint
from primal_attention.training.loop import BEST
from primal_attention.training.recipe import Recipe


class Trained(NamedTuple):
    """What ``best.safetensors`` holds."""

    recipe: Recipe
    model: nn.Module
    sizes: Sizes
    labels: tuple[str, ...]
    encoding: SeriesEncoding | None  # None where tokens are symbols


def load_trained(path: Path) -> Trained:
    """The model of a checkpoint or of a run directory, on the CPU, in evaluation mode."""
    path = path / BEST if path.is_dir() else path
    checkpoint = read_checkpoint(path)
    facts = checkpoint.facts
    missing = {"recipe", "sizes", "labels", "encoding"} - facts.keys()
    if missing:
        what = ", ".join(sorted(missing))
        raise ValueError(f"{path} lacks {what}; give the {BEST} of a run directory")
    recipe = Recipe.from_json(facts["recipe"])
    if recipe.task.startswith("rl/"):
        raise ValueError(f"{path} is a policy of {recipe.task}; primal rollout measures it")
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and replaced
        model = build_model(recipe, sizes := Sizes(**facts["sizes"]))
    model.load_state_dict(checkpoint.tensors)
    encoding = facts["encoding"] and SeriesEncoding.from_dict(facts["encoding"])
    return Trained(recipe, model.eval(), sizes, tuple(facts["labels"]), encoding)
