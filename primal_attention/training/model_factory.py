"""Build the model of a recipe, new or trained."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from primal_attention.atomic_files import fitting
from primal_attention.attention.primal.statistics import KSVDLayer
from primal_attention.state_dicts import check_fit
from primal_attention.tasks import SeriesEncoding, Sizes, Task
from primal_attention.training.checkpoint import BEST, read_checkpoint
from primal_attention.training.domains import DOMAINS, acts
from primal_attention.training.domains.sequences import build_sequence_model
from primal_attention.training.recipe import Recipe
from primal_attention.uncertainty import add_uncertainty


def build_model(recipe: Recipe, sizes: Sizes) -> Any:
    """Build the model of a recipe for cases of those sizes; parameters from the current seed.

    The domain of the task builds it: a ``LanguageModel`` for ``language``, a ``DecisionModel`` for
    ``rl``, a ``PictureClassifier`` for ``images``, otherwise, and for domains that are not
    registered, a ``TwoTowerClassifier`` where the recipe has two towers, else a
    ``SequenceClassifier``.
    """
    domain = DOMAINS.get(recipe.domain)
    model = (domain.build_model if domain else build_sequence_model)(recipe, sizes)
    if recipe.model.uncertainty:
        add_uncertainty(model)
    if not uses_objective(recipe, model):
        freeze_objective(model)
    return model


def trained_model(recipe: Recipe, sizes: Sizes, tensors: Mapping[str, Tensor]) -> Any:
    """Build the model of a recipe with trained weights, on the CPU, in evaluation mode.

    Raises:
        ValueError: The weights are of another model. Nothing of its size was allocated.
    """
    num_layers = recipe.model.num_layers
    if num_layers > len(tensors):
        raise ValueError(f"num_layers is {num_layers}, there are {len(tensors)} tensors")
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        check_fit(build_model(recipe, sizes), tensors)
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and replaced
        model = build_model(recipe, sizes)
    model.load_state_dict(tensors)
    return model.eval()


def uses_objective(recipe: Recipe, model: nn.Module) -> bool:
    """Return whether the loss has a KSVD objective: a weight, and layers to take it from."""
    return recipe.optim.eta > 0 and any(isinstance(layer, KSVDLayer) for layer in model.modules())


def freeze_objective(model: nn.Module) -> None:
    """Freeze what the objective alone would train, for which an optimiser needs no memory then."""
    for layer in model.modules():
        if isinstance(layer, KSVDLayer):
            layer.raw_lambda.requires_grad_(False)
            unused = {"e": "w_r", "r": "w_e"}.get(getattr(layer, "scores", "both"))
            parameter = getattr(layer, unused, None) if unused else None
            if parameter is not None:
                parameter.requires_grad_(False)


class Trained(NamedTuple):
    """A trained model and what it takes to use it: the content of ``best.safetensors``."""

    recipe: Recipe
    model: nn.Module
    sizes: Sizes
    labels: tuple[str, ...]
    encoding: SeriesEncoding | None  # None where tokens are symbols
    facts: Mapping[str, Any]  # as written beside the weights


def load_trained(path: Path) -> Trained:
    """Load the model of a checkpoint or of a run directory, on the CPU, in evaluation mode."""
    path = path / BEST if path.is_dir() else path
    checkpoint = read_checkpoint(path)
    facts = checkpoint.facts
    missing = {"recipe", "sizes", "labels", "encoding"} - facts.keys()
    if missing:
        what = ", ".join(sorted(missing))
        raise ValueError(f"{path} lacks {what}; give the {BEST} of a run directory")
    with fitting(path, "the checkpoint of a model"):
        recipe = Recipe.from_json(facts["recipe"])
    if acts(recipe):
        raise ValueError(f"{path} is a policy of {recipe.task}; primal rollout measures it")
    with fitting(path, "the checkpoint of a model"):
        sizes, encoding = Sizes(**facts["sizes"]), None
        if facts["encoding"]:
            encoding = SeriesEncoding.from_dict(facts["encoding"])
            length, expected = encoding.num_tokens, sizes.num_tokens
            if length != expected:
                raise ValueError(f"series of {length} tokens, a model of {expected}")
        labels = tuple(map(str, facts["labels"]))
        model = trained_model(recipe, sizes, checkpoint.tensors)
    return Trained(recipe, model, sizes, labels, encoding, facts)


def check_data(facts: Mapping[str, Any], task: Task) -> None:
    """Raise unless data have the sizes, classes and statistics of those that were trained on."""
    encoding = task.encoding.to_dict() if task.encoding else None
    ours = {"sizes": asdict(task.sizes), "labels": task.labels, "encoding": encoding}
    if not all(_same(value, facts[name]) for name, value in ours.items()):
        raise ValueError(
            f"the data of {task.name} are not those that the model was trained on; give the "
            "folder of those"
        )


def _same(ours: Any, theirs: Any) -> bool:
    """Compare plain values, numbers up to rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-8)
    return bool(ours == theirs)
