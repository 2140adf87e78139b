"""Landmarks that are really sampled: jitter and dropout of PrimalFormer on the Long Range Arena.

Under the clean protocol. One network for all tasks; the learning rate and the two numbers of the
landmarks are chosen for each task by validation accuracy, the column ``valid``.
"""

from collections.abc import Iterator

from primal_attention.training.recipe import Recipe
from primal_attention.training.recipes import find_recipe

SEEDS = 3
TASKS = ("listops", "image", "text", "pathfinder")
LEARNING_RATES = (5e-4, 1e-3, 1e-4)
LANDMARKS = ((0.6, 0.5), (0.6, 0.0), (0.0, 0.5), (0.0, 0.0))  # jitter, dropout


def recipes() -> Iterator[Recipe]:
    """Every setting on every task, one seed after the other."""
    for seed in range(SEEDS):
        for lr in LEARNING_RATES:
            for jitter, dropout in LANDMARKS:
                for task in TASKS:
                    plain = find_recipe(f"lra/{task}", "primalformer", "clean", seed)
                    yield plain.with_settings(
                        (
                            f"lr={lr}",
                            f"attention.landmark_jitter={jitter}",
                            f"attention.landmark_dropout={dropout}",
                        )
                    )
