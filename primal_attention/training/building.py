"""Model and optimiser of a recipe."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from primal_attention.attention.primal.statistics import KSVDLayer
from primal_attention.models import (
    Embedding,
    Encoder,
    LanguageModel,
    SequenceClassifier,
    Tower,
    TwoTowerClassifier,
    build_attentions,
)
from primal_attention.models.decision_transformer import DecisionModel, build_decision
from primal_attention.models.leaking import PaddingLeaks
from primal_attention.models.vision import PictureClassifier, build_pictures
from primal_attention.state_dicts import check_fit
from primal_attention.tasks import Sizes
from primal_attention.tasks.offline_rl import environment_of
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
    """The model of a recipe for cases of those sizes; parameters from the current seed.

    A ``LanguageModel`` for tasks of the domain ``language``, a ``DecisionModel`` for ``rl``, a
    ``PictureClassifier`` for ``images``, what ``BUILDERS`` has for another domain, a
    ``TwoTowerClassifier`` where the recipe has two towers, else a ``SequenceClassifier``.
    """
    domain = recipe.task.partition("/")[0]
    build = BUILDERS.get(domain, _pairs if recipe.num_towers == 2 else _sequences)
    model = build(recipe, sizes)
    if not uses_objective(recipe, model):
        freeze_objective(model)
    return model


def trained_model(recipe: Recipe, sizes: Sizes, tensors: Mapping[str, Tensor]) -> Any:
    """The model of a recipe with trained weights, on the CPU, in evaluation mode.

    Raises:
        ValueError: The weights are of another model. Nothing of its size was allocated.
    """
    if recipe.num_layers > len(tensors):
        raise ValueError(f"num_layers is {recipe.num_layers}, there are {len(tensors)} tensors")
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        check_fit(build_model(recipe, sizes), tensors)
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and replaced
        model = build_model(recipe, sizes)
    model.load_state_dict(tensors)
    return model.eval()


def _sequences(recipe: Recipe, sizes: Sizes) -> SequenceClassifier:
    return SequenceClassifier(
        *_embedding_and_encoder(recipe, sizes),
        sizes.num_outputs,
        pooling=recipe.pooling,
        num_tokens=sizes.num_tokens,
        dropout=recipe.dropout,
        mask_attention=recipe.mask_attention,
        hidden_dim=recipe.head_hidden_dim,
    )


def _pairs(recipe: Recipe, sizes: Sizes) -> TwoTowerClassifier:
    if recipe.head_hidden_dim is None:
        raise ValueError("two towers have a hidden layer in the head; set head_hidden_dim")
    tower = Tower(
        *_embedding_and_encoder(recipe, sizes),
        pooling=recipe.pooling,
        num_tokens=sizes.num_tokens,
        dropout=recipe.dropout,
        drop_features=False,
        mask_attention=recipe.mask_attention,
    )
    return TwoTowerClassifier(tower, sizes.num_outputs, hidden_dim=recipe.head_hidden_dim)


def _language(recipe: Recipe, sizes: Sizes) -> LanguageModel:
    if sizes.vocab_size is None:
        raise ValueError("a language model reads symbols; the sizes have no vocab_size")
    return LanguageModel(
        sizes.vocab_size,
        _attentions(recipe, sizes, causal=True),
        recipe.dim,
        recipe.ffn_dim,
        norm=recipe.norm,
        dropout=recipe.dropout,
        activation="relu",
    )


def _decisions(recipe: Recipe, sizes: Sizes) -> DecisionModel:
    if sizes.num_channels is None:
        raise ValueError("a Decision Transformer reads states; the sizes have no num_channels")
    names = ("dim", "num_layers", "num_heads", "ffn_dim", "num_tokens")
    return build_decision(
        recipe.model,
        state_dim=sizes.num_channels,
        action_dim=sizes.num_outputs,
        sizes={name: getattr(recipe, name) for name in names},
        dropout=recipe.dropout,
        max_steps=environment_of(recipe.task.partition("/")[2]).longest,
        options=recipe.attention,
    )


def _pictures(recipe: Recipe, sizes: Sizes) -> PictureClassifier:
    if sizes.mean is None or sizes.std is None:
        raise ValueError("a model of pictures standardises them; the sizes have no mean and std")
    names = ("image_size", "patch_size", "dim", "num_layers", "num_heads", "ffn_dim")
    return build_pictures(
        recipe.model,
        num_classes=sizes.num_outputs,
        statistics=(sizes.mean, sizes.std),
        sizes={name: getattr(recipe, name) for name in names},
        pooling=recipe.pooling,
        dropout=recipe.dropout,
        drop_path=recipe.drop_path,
        options=recipe.attention,
    )


#   By the domain of a task; a program with models of its own adds its domain here.
BUILDERS: dict[str, Callable[[Recipe, Sizes], nn.Module]] = {
    "language": _language,
    "rl": _decisions,
    "images": _pictures,
}


def _embedding_and_encoder(recipe: Recipe, sizes: Sizes) -> tuple[Embedding, Encoder]:
    attentions = _attentions(recipe, sizes)
    embedding = Embedding(
        recipe.dim,
        sizes.num_tokens,
        num_channels=sizes.num_channels,
        kernel_size=recipe.kernel_size,
        vocab_size=sizes.vocab_size,
    )
    if sizes.vocab_size is not None:  # positions start as symbols do
        nn.init.normal_(embedding.positions, std=0.02)
    encoder = Encoder(
        attentions, recipe.dim, recipe.ffn_dim, norm=recipe.norm, dropout=recipe.dropout
    )
    return embedding, encoder


def _attentions(recipe: Recipe, sizes: Sizes, *, causal: bool = False) -> list[nn.Module]:
    longest = sizes.num_tokens + (recipe.pooling == "class_token")
    options = {"max_tokens": longest, **recipe.attention}
    options["causal"] = causal or options.get("causal", False)
    attentions = build_attentions(
        recipe.model, recipe.num_layers, recipe.dim, recipe.num_heads, **options
    )
    if recipe.mask_primal:
        return attentions
    return [PaddingLeaks(each) if isinstance(each, KSVDLayer) else each for each in attentions]


def uses_objective(recipe: Recipe, model: nn.Module) -> bool:
    """Whether the loss has a KSVD objective: a weight, and layers to take it from."""
    return recipe.eta > 0 and any(isinstance(layer, KSVDLayer) for layer in model.modules())


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
    if recipe.weight_decay:
        layers = (each for each in model.modules() if isinstance(each, KSVDLayer))
        spared |= {id(layer.raw_lambda) for layer in layers if layer.raw_lambda.requires_grad}
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in spared]}]
    if spared:
        groups.append({"params": [p for p in parameters if id(p) in spared], "weight_decay": 0.0})
    settings = {
        "lr": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "betas": (0.9, recipe.adam_beta2),
        "eps": recipe.adam_eps,
        "capturable": capturable,
    }
    kinds = _REPLAYED if capturable else _OPTIMIZERS
    optimizer: Optimizer = kinds[recipe.optimizer](groups, **settings)
    return optimizer
