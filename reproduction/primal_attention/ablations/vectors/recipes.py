"""Right singular vectors alone (scores e), left ones alone (r), or both (mechanism 3)."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 5
SETS = ("UWaveGestureLibrary", "Handwriting", "JapaneseVowels")
CHANGES: tuple[tuple[str, ...], ...] = (
    (),  # both sides of 30 directions: 60 scores
    ("attention.scores=e",),
    ("attention.scores=r",),
    ("attention.num_directions=15",),  # both sides, and as many scores as one side of 30 has
)


def recipes() -> Iterator[Recipe]:
    """Every change on every set, the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            plain = find_recipe(f"uea/{name}", "primalformer", "clean", seed)
            for change in CHANGES:
                yield plain.with_settings(change)
