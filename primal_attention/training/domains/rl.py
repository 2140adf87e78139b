"""Offline reinforcement learning: Decision Transformers; recipes are counted in steps."""

from pathlib import Path

from primal_attention.models.decision_transformer import DecisionModel, build_decision
from primal_attention.tasks import RL_SETS, Sizes, Task, find_rl, prepare_rl, rl_task
from primal_attention.tasks.offline_rl import environment_of
from primal_attention.tasks.offline_rl.windows import TOKENS_PER_STEP
from primal_attention.training.domains.domain import Directions, Domain, with_directions
from primal_attention.training.recipe import Recipe

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
    """Train as the authors did, with the directions of their scripts."""
    environment_of(name)
    recipe = Recipe(
        task=f"rl/{name}",
        model=model,
        protocol="paper",
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
    return with_directions(recipe, Directions(RELEASED.get(name, CLEAN), ETA))


def rl_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Use one number of directions for all sets."""
    recipe = rl_paper(name, model, seed).replace(protocol="clean")
    return with_directions(recipe, Directions(CLEAN, ETA))


def _task(recipe: Recipe, folder: Path | None) -> Task:
    if not recipe.data.valid_fraction or recipe.data.num_tokens % TOKENS_PER_STEP:
        raise ValueError(
            f"valid_fraction of {recipe.task} must be in (0, 1), and num_tokens a multiple of "
            f"{TOKENS_PER_STEP}, got {recipe.data.valid_fraction} and {recipe.data.num_tokens}"
        )
    return rl_task(
        recipe.set_name,
        folder=folder,
        context=recipe.data.num_tokens // TOKENS_PER_STEP,
        valid=recipe.data.valid_fraction,
        seed=recipe.run.seed,
    )


def _model(recipe: Recipe, sizes: Sizes) -> DecisionModel:
    if sizes.num_channels is None:
        raise ValueError("a Decision Transformer reads states; the sizes have no num_channels")
    names = ("dim", "num_layers", "num_heads", "ffn_dim")
    shape = {name: getattr(recipe.model, name) for name in names}
    return build_decision(
        recipe.model.name,
        state_dim=sizes.num_channels,
        action_dim=sizes.num_outputs,
        sizes={**shape, "num_tokens": recipe.data.num_tokens},
        dropout=recipe.model.dropout,
        max_steps=environment_of(recipe.set_name).longest,
        options=recipe.model.attention,
    )


RL = Domain(
    sets=RL_SETS,
    make_task=_task,
    build_model=_model,
    recipes={"paper": rl_paper, "clean": rl_clean},
    find=find_rl,
    prepare=prepare_rl,
    usage="reads a file of D4RL, and prepares it",
    acts=True,
)
