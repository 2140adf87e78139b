"""Classifiers whose probabilities are measured by reproduction/calibration.py.

Small networks on two sets of time series: softmax attention, Primal-Attention in the last layer,
and there with Gaussian processes on its scores (KEP-SVGP). Settings were set before any run on the
test cases, and are the same for all networks.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
STRIDES = {"LSST": 1, "CharacterTrajectories": 4}  # the longest have 36 and 182 steps
SETTINGS = (
    *("dim=64", "num_heads=4", "ffn_dim=128", "kernel_size=7"),
    *("optimizer=adam", "batch_size=32", "steps=300", "eval_every=100", "patience=none"),
)
DIRECTIONS = ("attention.num_directions=16", "eta=0.1")
MODELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("softmax", ()),
    ("primal_plus", DIRECTIONS),
    ("primal_plus", (*DIRECTIONS, "uncertainty=true")),
)


def recipes() -> Iterator[Recipe]:
    """Every model on both sets, the seeds outermost."""
    for seed in range(SEEDS):
        for name, stride in STRIDES.items():
            for model, changes in MODELS:
                recipe = find_recipe(f"uea/{name}", model, "clean", seed)
                yield recipe.with_settings((*SETTINGS, f"stride={stride}", *changes))
