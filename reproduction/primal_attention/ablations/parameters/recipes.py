"""Softmax and Primal-Attention in networks of equal size (mechanism 1).

A Primal layer has no values; the width of the feed-forward layers makes up for it. So there are two
pairs of equal size: softmax and a wider PrimalFormer, PrimalFormer and a narrower softmax.
"""

from collections.abc import Iterator

from primal_attention.attention import build_attention
from primal_attention.training import Recipe, find_recipe

SEEDS = 5
SETS = {"UWaveGestureLibrary": 315, "Handwriting": 152, "JapaneseVowels": 26}  # and their tokens


def recipes() -> Iterator[Recipe]:
    """Both pairs on every set, the seeds outermost."""
    for seed in range(SEEDS):
        for name, tokens in SETS.items():
            softmax, primal = (
                find_recipe(f"uea/{name}", model, "clean", seed)
                for model in ("softmax", "primalformer")
            )
            more = width(parameters_of("softmax") - parameters_of("primal", primal, tokens))
            yield softmax
            yield primal
            yield primal.with_settings([f"ffn_dim={primal.model.ffn_dim + more}"])
            yield softmax.with_settings([f"ffn_dim={softmax.model.ffn_dim - more}"])


def parameters_of(name: str, recipe: Recipe | None = None, tokens: int = 1) -> int:
    """Count the parameters of one attention layer."""
    options = {} if recipe is None else {**recipe.model.attention, "max_tokens": tokens}
    layer = build_attention(name, 512, 8, **options)
    return sum(each.numel() for each in layer.parameters())


def width(parameters: int) -> int:
    """How many units of a feed-forward layer have so many parameters."""
    return round(parameters / (2 * 512 + 1))
