"""Table 8: Primal.+ with data-dependent (sampled) and data-independent (static) weights."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SETS = ("SelfRegulationSCP1", "UWaveGestureLibrary", "JapaneseVowels")
SEEDS = 3


def recipes() -> Iterator[Recipe]:
    """Both rows of the table, under the paper's protocol."""
    for seed in range(SEEDS):
        for name in SETS:
            sampled = find_recipe(f"uea/{name}", "primal_plus", "paper", seed)
            yield sampled
            directions = {"num_directions": sampled.model.attention["num_directions"]}
            yield sampled.replace(attention={"weights": "static", **directions})
