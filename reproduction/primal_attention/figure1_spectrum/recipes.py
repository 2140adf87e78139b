"""Figure 1: softmax against Primal.+, without an objective and with each of three.

Four layers in place of two, so that there is something between the first and the last.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
SETS = {"UWaveGestureLibrary": "2e-7"}  # and the eta of the paper's J^2, which sums over tokens
DEEPER = ("num_layers=4", "norm=pre")
OBJECTIVES: tuple[tuple[str, ...], ...] = (
    ("eta=0",),
    ("objective=released", "eta=0.1"),
    ("objective=explained_energy", "eta=0.1"),
)


def recipes() -> Iterator[Recipe]:
    """All models on every set, the seeds outermost."""
    for seed in range(SEEDS):
        for name, eta in SETS.items():
            yield find_recipe(f"uea/{name}", "softmax", "clean", seed).with_settings(DEEPER)
            plain = find_recipe(f"uea/{name}", "primal_plus", "clean", seed).with_settings(DEEPER)
            for objective in (*OBJECTIVES, ("objective=zero", f"eta={eta}")):
                yield plain.with_settings(objective)
