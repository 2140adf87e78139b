"""Attention-BN, -SH and BN+SH against their bases, softmax and linear attention.

Time series first, the seeds outermost; then the Long Range Arena, whose runs take hours.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 5
SETS = ("UWaveGestureLibrary", "Handwriting", "JapaneseVowels")
LONG_SERIES = ("SelfRegulationSCP1", "SelfRegulationSCP2")
ARENA, ARENA_SEEDS = ("listops", "image", "text", "pathfinder", "retrieval-imdb"), 3
HEADS = {8: "[1,1,2,2,4,4,8,8]", 2: "[1,2]"}  # the scales that softmax_sh has by itself


def recipes() -> Iterator[Recipe]:
    """Eight models on every task."""
    for names in (SETS, LONG_SERIES):
        for seed in range(SEEDS):
            for name in names:
                yield from models(f"uea/{name}", seed)
    for seed in range(ARENA_SEEDS):
        for name in ARENA:
            yield from models(f"lra/{name}", seed)


def models(task: str, seed: int) -> Iterator[Recipe]:
    """Both bases with nothing, BN, SH and both."""
    for model in ("softmax", "softmax_bn", "softmax_sh", "softmax_bn_sh"):
        yield find_recipe(task, model, "clean", seed)
    for model in ("linear", "linear_bn"):
        plain = find_recipe(task, model, "clean", seed)
        yield plain
        yield plain.with_settings([f"attention.scales={HEADS[plain.model.num_heads]}"])
