"""Table 6: PrimalFormer over the weight eta of the objective and the number s of directions."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SETS = ("SelfRegulationSCP1", "UWaveGestureLibrary", "JapaneseVowels")
SEEDS = 2


def recipes() -> Iterator[Recipe]:
    """The paper's grid, under its own protocol."""
    for seed in range(SEEDS):
        for name in SETS:
            plain = find_recipe(f"uea/{name}", "primalformer", "paper", seed)
            for directions in (20, 30, 40):
                for eta in (0.0, 0.1, 0.2, 0.5):
                    cell = [f"attention.num_directions={directions}", f"eta={eta}"]
                    yield plain.with_settings(cell)
