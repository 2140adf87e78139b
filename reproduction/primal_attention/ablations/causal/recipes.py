"""Causal attention where the task does not ask for it: what it costs (open question 3).

Sampled weights cannot be causal, so static and dual ones stand beside them, causal and not.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
SETS = ("UWaveGestureLibrary", "Handwriting", "JapaneseVowels")
WEIGHTS = ("static", "dual")


def recipes() -> Iterator[Recipe]:
    """Softmax, linear and Primal attention, causal and not; the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            for model in ("softmax", "linear"):
                plain = find_recipe(f"uea/{name}", model, "clean", seed)
                yield from (plain, causal(plain))
            primal = find_recipe(f"uea/{name}", "primalformer", "clean", seed)
            yield primal
            for weights in WEIGHTS:
                other = primal.replace(attention=directions(primal, weights))
                yield from (other, causal(other))


def causal(recipe: Recipe) -> Recipe:
    """Make the recipe causal."""
    return recipe.with_settings(["attention.causal=true"])


def directions(recipe: Recipe, weights: str) -> dict[str, object]:
    """Options of other weights: these have no landmarks."""
    return {"num_directions": recipe.model.attention["num_directions"], "weights": weights}
