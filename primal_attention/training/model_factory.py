"""Build the model and the optimiser of a recipe."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primal_attention.attention.primal.statistics import KSVDLayer
from primal_attention.state_dicts import check_fit
from primal_attention.tasks import Sizes
from primal_attention.training.domains import DOMAINS
from primal_attention.training.domains.sequences import build_sequence_model
from primal_attention.training.radam import LeanRAdam
from primal_attention.training.recipe import Recipe

_OPTIMIZERS: dict[str, Any] = {
    "radam": torch.optim.RAdam,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_REPLAYED: dict[str, Any] = {  # on a GPU, with few passes over the parameters
    "radam": LeanRAdam,
    "adam": partial(torch.optim.Adam, fused=True),
    "adamw": partial(torch.optim.AdamW, fused=True),
}


def build_model(recipe: Recipe, sizes: Sizes) -> Any:
    """Build the model of a recipe for cases of those sizes; parameters from the current seed.

    The domain of the task builds it: a ``LanguageModel`` for ``language``, a ``DecisionModel`` for
    ``rl``, a ``PictureClassifier`` for ``images``, otherwise, and for domains that are not
    registered, a ``TwoTowerClassifier`` where the recipe has two towers, else a
    ``SequenceClassifier``.
    """
    domain = DOMAINS.get(recipe.domain)
    model = (domain.build_model if domain else build_sequence_model)(recipe, sizes)
    if not uses_objective(recipe, model):
        freeze_objective(model)
    return model


def trained_model(recipe: Recipe, sizes: Sizes, tensors: Mapping[str, Tensor]) -> Any:
    """The model of a recipe with trained weights, on the CPU, in evaluation mode.

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
    """Whether the loss has a KSVD objective: a weight, and layers to take it from."""
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


def build_optimizer(recipe: Recipe, model: nn.Module, *, capturable: bool = False) -> Optimizer:
    """The optimiser of a recipe over the parameters that are not frozen.

    No weight decay pulls at those that a model names, ``undecayed()``, nor at Lambda, whose zero is
    no smaller model: softplus(0) is 0.69.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    undecayed: Any = getattr(model, "undecayed", list)
    spared = {id(each) for each in undecayed()}
    if recipe.optim.weight_decay:
        layers = (each for each in model.modules() if isinstance(each, KSVDLayer))
        spared |= {id(layer.raw_lambda) for layer in layers if layer.raw_lambda.requires_grad}
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in spared]}]
    if spared:
        groups.append({"params": [p for p in parameters if id(p) in spared], "weight_decay": 0.0})
    settings = {
        "lr": recipe.optim.lr,
        "weight_decay": recipe.optim.weight_decay,
        "betas": (0.9, recipe.optim.adam_beta2),
        "eps": recipe.optim.adam_eps,
        "capturable": capturable,
    }
    kinds = _REPLAYED if capturable else _OPTIMIZERS
    optimizer: Optimizer = kinds[recipe.optim.optimizer](groups, **settings)
    return optimizer
