"""Table 1: accuracy on UEA time series, each model under both protocols."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = {"paper": 3, "clean": 5}
SETS = (
    "SelfRegulationSCP2",
    "SelfRegulationSCP1",
    "UWaveGestureLibrary",
    "Handwriting",
    "JapaneseVowels",
)
LARGE_SETS = {"SpokenArabicDigits": 2}  # and how many seeds they have
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
    for protocol, seeds in SEEDS.items():
        for name in SETS:
            yield from cells(name, protocol, seeds)
    for protocol in SEEDS:
        for name, seeds in LARGE_SETS.items():
            yield from cells(name, protocol, seeds)


def cells(name: str, protocol: str, seeds: int) -> Iterator[Recipe]:
    """The row of a set."""
    for seed in range(seeds):
        for model in MODELS:
            yield find_recipe(f"uea/{name}", model, protocol, seed)
