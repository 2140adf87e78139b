"""Models of sequences: the default of a domain, and the attentions that all domains share."""

from typing import Any

from torch import nn

from primal_attention import models
from primal_attention.attention.primal.statistics import KSVDLayer
from primal_attention.models.stacks import PaddingLeaks
from primal_attention.tasks import Sizes
from primal_attention.training.recipe import Recipe


def build_sequence_model(recipe: Recipe, sizes: Sizes) -> nn.Module:
    """Build a ``TwoTowerClassifier`` where the recipe has two towers, else a single classifier."""
    model, num_outputs = recipe.model, sizes.num_outputs
    options: dict[str, Any] = {
        "pooling": model.pooling,
        "num_tokens": -(-sizes.num_tokens // model.stride),
        "dropout": model.dropout,
        "mask_attention": model.mask_attention,
    }
    if model.num_towers == 1:
        parts = _embedding_and_encoder(recipe, sizes)
        hidden_dim = model.head_hidden_dim
        return models.SequenceClassifier(*parts, num_outputs, hidden_dim=hidden_dim, **options)
    if model.head_hidden_dim is None:
        raise ValueError("two towers have a hidden layer in the head; set head_hidden_dim")
    tower = models.Tower(*_embedding_and_encoder(recipe, sizes), drop_features=False, **options)
    return models.TwoTowerClassifier(tower, num_outputs, hidden_dim=model.head_hidden_dim)


def _embedding_and_encoder(recipe: Recipe, sizes: Sizes) -> tuple[models.Embedding, models.Encoder]:
    model = recipe.model
    attentions = attentions_of(recipe, sizes)
    embedding = models.Embedding(
        model.dim,
        sizes.num_tokens,
        num_channels=sizes.num_channels,
        kernel_size=model.kernel_size,
        stride=model.stride,
        num_filters=model.num_filters,
        vocab_size=sizes.vocab_size,
    )
    if sizes.vocab_size is not None:  # positions start as symbols do
        nn.init.normal_(embedding.positions, std=0.02)
    encoder = models.Encoder(
        attentions,
        model.dim,
        model.ffn_dim,
        norm=model.norm,
        dropout=model.dropout,
    )
    return embedding, encoder


def attentions_of(recipe: Recipe, sizes: Sizes, *, causal: bool = False) -> list[nn.Module]:
    """Build the attention of each layer of a recipe's model."""
    model = recipe.model
    longest = -(-sizes.num_tokens // model.stride) + (model.pooling == "class_token")
    options = {"max_tokens": longest, **model.attention}
    options["causal"] = causal or options.get("causal", False)
    attentions = models.build_attentions(
        model.name,
        model.num_layers,
        model.dim,
        model.num_heads,
        **options,
    )
    if model.mask_primal:
        return attentions
    return [PaddingLeaks(each) if isinstance(each, KSVDLayer) else each for each in attentions]
