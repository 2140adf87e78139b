"""Table 1: accuracy on UEA time series, each model under both protocols."""

from collections.abc import Iterator

from primal_attention.training.recipe import Recipe
from primal_attention.training.recipes import find_recipe

#   The sets of the paper that are at hand, the costliest first; seeds of each (paper, clean).
SETS = {
    "SpokenArabicDigits": (2, 2),
    "SelfRegulationSCP2": (3, 5),
    "SelfRegulationSCP1": (3, 5),
    "UWaveGestureLibrary": (3, 5),
    "Handwriting": (3, 5),
    "JapaneseVowels": (3, 5),
}
MODELS = (
    "primalformer",
    "primal_plus",
    "softmax",
    "linear",
    "flow",
    "softmax_bn",
    "softmax_sh",
    "softmax_bn_sh",
)


def recipes() -> Iterator[Recipe]:
    """Every cell of the table, with its seeds."""
    for name, (paper, clean) in SETS.items():
        for protocol, seeds in (("paper", paper), ("clean", clean)):
            for seed in range(seeds):
                for model in MODELS:
                    yield find_recipe(f"uea/{name}", model, protocol, seed)
