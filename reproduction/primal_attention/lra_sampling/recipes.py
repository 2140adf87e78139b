"""Landmarks that are really sampled: jitter and dropout of PrimalFormer on the Long Range Arena.

Under the clean protocol. One network for all tasks; the learning rate and the two numbers of the
landmarks are chosen for each task by validation accuracy, the column ``valid``. The objective is
the same for all.
"""

from collections.abc import Iterator
from itertools import product

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
TASKS = ("listops", "image", "text", "pathfinder")
LEARNING_RATES = (5e-4, 1e-3, 1e-4)
LANDMARKS = (  # jitter, dropout
    *((0.6, 0.5), (0.6, 0.0), (0.0, 0.5), (0.0, 0.0)),
    *((2.0, 0.5), (2.0, 0.8), (8.0, 0.5), (8.0, 0.8)),  # landmarks that leave their places
)
OBJECTIVES = (("released_batch", 0.1), ("explained_energy", 0.01))  # and eta


def recipes() -> Iterator[Recipe]:
    """Every setting on every task, one seed after the other."""
    options = list(product(OBJECTIVES, LEARNING_RATES, LANDMARKS, TASKS))
    for seed, ((objective, eta), lr, (jitter, dropout), task) in product(range(SEEDS), options):
        plain = find_recipe(f"lra/{task}", "primalformer", "clean", seed)
        yield plain.with_settings(
            (
                f"lr={lr}",
                f"objective={objective}",
                f"eta={eta}",
                f"attention.landmark_jitter={jitter}",
                f"attention.landmark_dropout={dropout}",
            )
        )
