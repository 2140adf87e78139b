"""Feature maps across tasks (open question 1): cosine, exponential, elu, relu, identity.

Time series first; then the Long Range Arena and language, whose runs take hours.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 5
SETS = ("UWaveGestureLibrary", "Handwriting", "JapaneseVowels")
LONG_TASKS = ("lra/listops", "lra/image", "language/wikitext-2")
LONG_SEEDS = 3
CHANGES: tuple[tuple[str, ...], ...] = (
    (),  # cosine, the paper's
    ("attention.feature_map=exponential",),
    ("attention.feature_map=elu",),
    ("attention.feature_map=relu",),
    ("attention.feature_map=identity",),
)


def recipes() -> Iterator[Recipe]:
    """Every map on every task, the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            yield from maps(f"uea/{name}", seed)
    for seed in range(LONG_SEEDS):
        for task in LONG_TASKS:
            yield from maps(task, seed)


def maps(task: str, seed: int) -> Iterator[Recipe]:
    """A PrimalFormer with each of them."""
    plain = find_recipe(task, "primalformer", "clean", seed)
    for change in CHANGES:
        yield plain.with_settings(change)
