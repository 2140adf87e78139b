"""Recipes of offline reinforcement learning: Decision Transformers, counted in steps."""

from primal_attention.tasks.offline_rl import environment_of
from primal_attention.training.recipe import Recipe
from primal_attention.training.recipes.directions import Directions, with_directions

ETA = 0.05
RELEASED: dict[str, int] = {  # directions s, by set
    "halfcheetah-medium-expert": 96,
    "hopper-medium-expert": 64,
    "walker2d-medium-expert": 96,
    "halfcheetah-medium": 64,
    "hopper-medium": 96,
    "walker2d-medium": 96,
    "halfcheetah-medium-replay": 32,
    "hopper-medium-replay": 64,
    "walker2d-medium-replay": 96,
}
CLEAN = 64  # directions, set before any run, for all sets alike
CONTEXT = 20  # steps, of three tokens each


def rl_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """As the authors trained, with the directions of their scripts."""
    return _recipe(name, model, "paper", seed, RELEASED.get(name, CLEAN))


def rl_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """The same with one number of directions for all sets."""
    return _recipe(name, model, "clean", seed, CLEAN)


def _recipe(name: str, model: str, protocol: str, seed: int, directions: int) -> Recipe:
    environment_of(name)
    recipe = Recipe(
        task=f"rl/{name}",
        model=model,
        protocol=protocol,
        seed=seed,
        valid_fraction=0.05,
        num_tokens=3 * CONTEXT,
        num_layers=3,
        dim=256,
        num_heads=4,
        ffn_dim=1024,
        norm="pre",
        optimizer="adamw",
        lr=1e-3,
        weight_decay=1e-4,
        batch_size=64,
        steps=100_000,
        schedule="warmup",
        warmup=0.1,
        clip_norm=0.25,
        eval_every=10_000,
    )
    return with_directions(recipe, Directions(directions, ETA))
