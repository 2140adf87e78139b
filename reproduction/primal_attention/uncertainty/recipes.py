"""Classifiers whose probabilities are measured by reproduction/calibration.py.

Small networks on two sets of time series: softmax attention, Primal-Attention, and Primal-Attention
with Gaussian processes on the scores of its last layer (KEP-SVGP). Settings were set before any run
on the test cases, and are the same for both sets and all networks.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
SETS = ("LSST", "UWaveGestureLibrary")
SIZES = ("dim=64", "num_heads=4", "ffn_dim=128", "epochs=60", "patience=none")
DIRECTIONS = ("attention.num_directions=16", "eta=0.1")
MODELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("softmax", ()),
    ("primalformer", DIRECTIONS),
    ("primalformer", (*DIRECTIONS, "uncertainty=true")),
)


def recipes() -> Iterator[Recipe]:
    """Every model on both sets, the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            for model, changes in MODELS:
                recipe = find_recipe(f"uea/{name}", model, "clean", seed)
                yield recipe.with_settings((*SIZES, *changes))
