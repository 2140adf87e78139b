"""Table 4: Decision Transformers on D4RL-like data, under both protocols."""

from collections.abc import Iterator

from primal_attention.tasks import RL_SETS
from primal_attention.training import Recipe, find_recipe

SEEDS = 3
MODELS = ("primal_plus", "softmax", "linear", "flow", "primalformer", "cosformer", "performer")


def recipes() -> Iterator[Recipe]:
    """Every cell of the table, one seed after the other; protocols differ where s does."""
    for seed in range(SEEDS):
        for model in MODELS:
            for name in RL_SETS:
                yield find_recipe(f"rl/{name}", model, "clean", seed)
                if model == "primal_plus":
                    yield find_recipe(f"rl/{name}", model, "paper", seed)
