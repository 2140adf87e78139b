"""The names of models as lists of mechanisms, one for each layer."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from primal_attention.attention import ATTENTIONS, build_attention, card_of, options_of
from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.validation import check_choice, check_sizes
from primal_attention.attention.primal import KSVDLayer
from primal_attention.patching.patch import patch

Host = TypeVar("Host", bound=nn.Module)

# Models whose names are not those of a mechanism: the one that they are about, and whether it is
# that of the last layer alone, behind softmax attention.
_NAMED = {
    "primalformer": ("primal", False),
    "primal_plus": ("primal", True),
    "primalformer_time": ("primal_time", False),
    "primal_time_plus": ("primal_time", True),
}
_NAMED_MECHANISMS = {mechanism for mechanism, _ in _NAMED.values()}
MODELS = (*_NAMED, *(name for name in ATTENTIONS if name not in _NAMED_MECHANISMS))


def mechanism_of(model: str) -> str:
    """Return the mechanism that a model is about; its options are those of the model."""
    check_choice("model", model, MODELS)
    return _NAMED[model][0] if model in _NAMED else model


def is_of_last_layer(model: str) -> bool:
    """Return whether the mechanism of a model is that of its last layer alone."""
    return model in _NAMED and _NAMED[model][1]


def has_objective(model: str) -> bool:
    """Return whether the layers of a model have a KSVD objective."""
    return issubclass(ATTENTIONS[mechanism_of(model)], KSVDLayer)


def layer_names(model: str, num_layers: int) -> tuple[str, ...]:
    """Return the mechanism of each layer: all the same, or softmax in all but the last."""
    check_sizes(num_layers=num_layers)
    name = mechanism_of(model)
    if is_of_last_layer(model):
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
    """Build the attentions of a model, one a layer.

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
    if causal:
        options = {**card_of(name).causal_forms[0], **options}
    if max_tokens is not None and "max_tokens" in options_of(name):
        options = {"max_tokens": max_tokens, **options}
    return [
        build_attention(each, dim, num_heads, causal=causal, **(options if each == name else {}))
        for each in layer_names(model, num_layers)
    ]


def patch_host(
    host: Host, model: str, options: Mapping[str, Any], *, max_tokens: int | None = None
) -> Host:
    """Put the attentions of a model into a foreign one, which ``softmax`` leaves as it comes.

    Args:
        host: The foreign model, changed in place.
        model: One of ``MODELS``.
        options: Go to the layers of the mechanism that the model is about.
        max_tokens: The longest sequence, where the host does not say it.
    """
    if model == "softmax" and not options:
        return host
    name = mechanism_of(model)
    if max_tokens is not None and "max_tokens" in options_of(name):
        options = {"max_tokens": max_tokens, **options}
    return patch(host, name, -1 if is_of_last_layer(model) else "all", **options)


class PaddingLeaks(nn.Module):
    """An attention that takes padding for tokens, as released for the Long Range Arena.

    In the released Primal layers padding is among the landmarks, the scores and the objective, and
    the mask is laid on the output alone. It is there to reproduce that, and for nothing else.

    Args:
        attention: Any module [B, N, D] -> [B, N, D].
    """

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Return outputs [B, N, D], zero at padding; the others depend on its content."""
        return zero_padding(self.attention(x), token_mask)
