"""No objective against the released one, the paper's and explained energy (mechanism 2).

The paper's J^2 sums over tokens and is about N^2 times the released one; its eta makes the two of
one size when training starts.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 5
ETA_OF_ZERO = {"UWaveGestureLibrary": "2e-7", "JapaneseVowels": "7e-5"}
CHANGES: tuple[tuple[str, ...], ...] = (
    ("eta=0",),
    ("objective=released", "eta=0.1"),
    ("objective=released", "eta=1"),
    ("objective=explained_energy", "eta=0.1"),
    ("objective=explained_energy", "eta=1"),
)


def recipes() -> Iterator[Recipe]:
    """Every objective on both sets, the seeds outermost."""
    for seed in range(SEEDS):
        for name, eta in ETA_OF_ZERO.items():
            plain = find_recipe(f"uea/{name}", "primalformer", "clean", seed)
            for change in (*CHANGES, ("objective=zero", f"eta={eta}")):
                yield plain.with_settings(change)
