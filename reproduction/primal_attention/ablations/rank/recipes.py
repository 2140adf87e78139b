"""The number s of directions against the effective rank of each layer (open question 2)."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
SETS = ("UWaveGestureLibrary", "JapaneseVowels")
DIRECTIONS = (1, 2, 4, 8, 16, 32, 64)


def recipes() -> Iterator[Recipe]:
    """Softmax, whose matrices say how many it would take, and every s; the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            yield find_recipe(f"uea/{name}", "softmax", "clean", seed)
            plain = find_recipe(f"uea/{name}", "primalformer", "clean", seed)
            for number in DIRECTIONS:
                yield plain.with_settings([f"attention.num_directions={number}"])
