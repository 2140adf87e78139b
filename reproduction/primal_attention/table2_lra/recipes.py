"""Table 2: accuracy on the Long Range Arena, each model under both protocols."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
TASKS = ("listops", "image", "text", "pathfinder", "retrieval-imdb")  # the shortest schedules first
MODELS = (
    "primalformer",
    "primal_plus",
    "softmax",
    "nystrom",
    "linformer",
    "performer",
    "softmax_bn_sh",
)


def recipes() -> Iterator[Recipe]:
    """Every cell of the table, one seed after the other."""
    for seed in range(SEEDS):
        for protocol in ("paper", "clean"):
            for task in TASKS:
                for model in MODELS:
                    yield find_recipe(f"lra/{task}", model, protocol, seed)
