"""Model and optimiser of a recipe."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from primal_attention.attention.statistics import KSVDLayer
from primal_attention.models import Embedding, Encoder, SequenceClassifier, build_attentions
from primal_attention.tasks import Sizes
from primal_attention.training.recipe import Recipe

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "radam": torch.optim.RAdam,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_FUSED = ("adam", "adamw")  # on a GPU one pass over the parameters


def build_model(recipe: Recipe, sizes: Sizes) -> SequenceClassifier:
    """The classifier of a recipe for cases of those sizes; parameters from the current seed."""
    longest = sizes.num_tokens + (recipe.pooling == "class_token")
    options = {"max_tokens": longest, **recipe.attention}
    attentions = build_attentions(
        recipe.model, recipe.num_layers, recipe.dim, recipe.num_heads, **options
    )
    embedding = Embedding(
        recipe.dim,
        sizes.num_tokens,
        num_channels=sizes.num_channels,
        kernel_size=recipe.kernel_size,
        vocab_size=sizes.vocab_size,
    )
    encoder = Encoder(
        attentions, recipe.dim, recipe.ffn_dim, norm=recipe.norm, dropout=recipe.dropout
    )
    model = SequenceClassifier(
        embedding,
        encoder,
        sizes.num_outputs,
        pooling=recipe.pooling,
        num_tokens=sizes.num_tokens,
        dropout=recipe.dropout,
        mask_attention=recipe.mask_attention,
    )
    if not uses_objective(recipe, model):
        freeze_objective(model)
    return model


def uses_objective(recipe: Recipe, model: nn.Module) -> bool:
    """Whether the loss has a KSVD objective: a weight, and layers to take it from."""
    return recipe.eta > 0 and any(isinstance(layer, KSVDLayer) for layer in model.modules())


def freeze_objective(model: nn.Module) -> None:
    """Freeze what the objective alone would train; DDP stops at parameters without a gradient."""
    for layer in model.modules():
        if isinstance(layer, KSVDLayer):
            layer.raw_lambda.requires_grad_(False)
            unused = {"e": "w_r", "r": "w_e"}.get(getattr(layer, "scores", "both"))
            parameter = getattr(layer, unused, None) if unused else None
            if parameter is not None:
                parameter.requires_grad_(False)


def build_optimizer(recipe: Recipe, model: nn.Module, *, capturable: bool = False) -> Optimizer:
    """The optimiser of a recipe over the parameters that are not frozen."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = {"lr": recipe.lr, "weight_decay": recipe.weight_decay, "capturable": capturable}
    if capturable and recipe.optimizer in _FUSED:
        settings["fused"] = True
    return _OPTIMIZERS[recipe.optimizer](parameters, **settings)  # type: ignore[arg-type]
