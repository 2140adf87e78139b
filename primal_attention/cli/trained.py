"""A trained model and what it takes to use it, from a checkpoint."""

from pathlib import Path
from typing import NamedTuple

from torch import nn

from primal_attention.atomic_files import fitting
from primal_attention.tasks import SeriesEncoding, Sizes
from primal_attention.training.checkpoint import read_checkpoint
from primal_attention.training.domains import acts
from primal_attention.training.loop import BEST
from primal_attention.training.model_factory import trained_model
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
    with fitting(path, "the checkpoint of a model"):
        recipe, sizes = Recipe.from_json(facts["recipe"]), Sizes(**facts["sizes"])
        encoding = None
        if facts["encoding"] and not acts(recipe):
            encoding = SeriesEncoding.from_dict(facts["encoding"])
            _check_length(encoding, sizes)
        labels = tuple(map(str, facts["labels"]))
    if acts(recipe):
        raise ValueError(f"{path} is a policy of {recipe.task}; primal rollout measures it")
    with fitting(path, "the checkpoint of a model"):
        model = trained_model(recipe, sizes, checkpoint.tensors)
    return Trained(recipe, model, sizes, labels, encoding)


def _check_length(encoding: SeriesEncoding, sizes: Sizes) -> None:
    if encoding.num_tokens != sizes.num_tokens:
        raise ValueError(f"series of {encoding.num_tokens} tokens, a model of {sizes.num_tokens}")
