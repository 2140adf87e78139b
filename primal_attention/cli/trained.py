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
    labels: tuple[str, ...]
    encoding: SeriesEncoding


def load_trained(path: Path) -> Trained:
    """The model of a checkpoint or of a run directory, on the CPU, in evaluation mode."""
    path = path / BEST if path.is_dir() else path
    checkpoint = read_checkpoint(path)
    facts = checkpoint.facts
    missing = {"recipe", "sizes", "labels", "encoding"} - facts.keys()
    if missing or facts["encoding"] is None:
        what = ", ".join(sorted(missing)) or "encoding"
        raise ValueError(f"{path} lacks {what}; give the {BEST} of a run directory")
    recipe = Recipe.from_json(facts["recipe"])
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and replaced
        model = build_model(recipe, Sizes(**facts["sizes"]))
    model.load_state_dict(checkpoint.tensors)
    encoding = SeriesEncoding.from_dict(facts["encoding"])
    return Trained(recipe, model.eval(), tuple(facts["labels"]), encoding)
