"""Table 3: what a training step costs, with directions and eta of the authors' timing script."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

TIMED = {  # directions s and eta
    "primalformer": {
        "listops": (20, 0.05),
        "text": (20, 0.01),
        "retrieval": (30, 0.05),
        "image": (20, 0.05),
        "pathfinder": (30, 0.1),
    },
    "primal_plus": {
        "listops": (20, 0.05),
        "text": (20, 0.1),
        "retrieval": (20, 0.1),
        "image": (30, 0.1),
        "pathfinder": (30, 0.05),
    },
}
TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
MODELS = (
    "softmax",
    "nystrom",
    "linformer",
    "performer",
    "reformer",
    "primal_plus",
    "primalformer",
)


def recipes() -> Iterator[Recipe]:
    """Every cell of the table, with the masks of either protocol."""
    for protocol in ("paper", "clean"):
        for task in TASKS:
            for model in MODELS:
                yield timed(find_recipe(f"lra/{task}", model, protocol))


def timed(recipe: Recipe) -> Recipe:
    """The recipe as the authors timed it."""
    if recipe.model.name not in TIMED:
        return recipe
    directions, eta = TIMED[recipe.model.name][recipe.set_name]
    return recipe.with_settings([f"attention.num_directions={directions}", f"eta={eta}"])
