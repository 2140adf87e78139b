"""Which attention stands in which layer: the names of models as lists of mechanisms."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from primal_attention.attention import ATTENTIONS, build_attention
from primal_attention.attention.base.validation import check_choice, check_sizes

MODELS = ("primalformer", "primal_plus", *(name for name in ATTENTIONS if name != "primal"))


def mechanism_of(model: str) -> str:
    """The mechanism that a model is about; its options are those of the model."""
    check_choice("model", model, MODELS)
    return "primal" if model in ("primalformer", "primal_plus") else model


def layer_names(model: str, num_layers: int) -> tuple[str, ...]:
    """The mechanism of each layer: all the same, or in Primal.+ softmax in all but the last."""
    check_sizes(num_layers=num_layers)
    name = mechanism_of(model)
    if model == "primal_plus":
        return ("softmax",) * (num_layers - 1) + (name,)
    return (name,) * num_layers


def build_attentions(
    model: str,
    num_layers: int,
    dim: int,
    num_heads: int,
    *,
    causal: bool = False,
    max_tokens: int | None = None,
    **options: Any,
) -> list[nn.Module]:
    """The attentions of a model, one a layer.

    Args:
        model: One of ``MODELS``.
        num_layers: Number of layers.
        dim: Model dimension D, a multiple of ``num_heads``.
        num_heads: Number of heads H.
        causal: Each token sees itself and those before it. A Primal layer then has static weights
            unless the options say dual.
        max_tokens: The longest sequence, for the mechanisms with an option of that name; a class
            token counts.
        **options: Go to the layers of the mechanism that the model is about.
    """
    check_sizes(max_tokens=max_tokens)
    name = mechanism_of(model)
    if causal and name == "primal":
        options = {"weights": "static", **options}
    if max_tokens is not None and _has_max_tokens(name):
        options = {"max_tokens": max_tokens, **options}
    return [
        build_attention(each, dim, num_heads, causal=causal, **(options if each == name else {}))
        for each in layer_names(model, num_layers)
    ]


def _has_max_tokens(name: str) -> bool:
    return "max_tokens" in inspect.signature(ATTENTIONS[name]).parameters
