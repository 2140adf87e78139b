"""Word-level language models; recipes are counted in steps of 32,768 tokens."""

from pathlib import Path
from typing import Any, NamedTuple

from primal_attention.models import LanguageModel
from primal_attention.models.stacks import has_objective, mechanism_of
from primal_attention.tasks import (
    LANGUAGE_SETS,
    Sizes,
    Task,
    find_language,
    language_task,
    prepare_language,
)
from primal_attention.training.domains.domain import Domain
from primal_attention.training.domains.sequences import attentions_of
from primal_attention.training.recipe import Recipe, nearest

NUM_DIRECTIONS, ETA = 30, 0.1
WARMUP = 6_000 / 150_000  # the part of all steps in which the learning rate rises


class TextSchedule(NamedTuple):
    """Length of training on a text, and dropout of its models."""

    steps: int
    eval_every: int
    dropout: float


SCHEDULES: dict[str, TextSchedule] = {
    #   Ours, set before any run: the paper has no model of this text, a fiftieth of the other.
    "wikitext-2": TextSchedule(3_200, 160, 0.3),
    "wikitext-103": TextSchedule(150_000, 3_000, 0.1),
    "imdb": TextSchedule(3_200, 160, 0.3),  # ours too; ten times over the training part
}


def language_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """Train as the authors did: the learning rate falls with the root of the step, no clipping.

    Their Adam decays weights apart from the gradient, which is AdamW. They work in float32.
    """
    if name not in LANGUAGE_SETS:
        raise ValueError(f"no text is called {name!r}; {nearest(name, LANGUAGE_SETS)}")
    schedule = SCHEDULES[name]
    return Recipe(
        task=f"language/{name}",
        model=model,
        protocol="paper",
        seed=seed,
        valid_fraction=0.0,
        num_tokens=512,
        context_tokens=400,
        num_layers=6,
        dim=512,
        num_heads=8,
        ffn_dim=2048,
        norm="pre",
        dropout=schedule.dropout,
        attention=_options(model),
        eta=ETA if mechanism_of(model) == "primal" else 0.0,
        objective="released",
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.01,
        adam_beta2=0.98,
        batch_size=64,
        steps=schedule.steps,
        schedule="inverse_sqrt",
        warmup=WARMUP,
        clip_norm=None,
        eval_every=schedule.eval_every,
        precision="bf16",
    )


def language_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Clip gradients and let the learning rate end at zero; network and length are the paper's.

    The paper's protocol selects on the validation part too, so there is no leak to mend.
    """
    recipe = language_paper(name, model, seed)
    return recipe.replace(protocol="clean", schedule="cosine", clip_norm=1.0)


def _options(model: str) -> dict[str, Any]:
    """Return options of the Primal layers: static weights in Primal.+, as the authors have them."""
    if not has_objective(model):
        return {}
    if mechanism_of(model) == "primal_time":
        return {"num_directions": NUM_DIRECTIONS}
    #   Where all layers are Primal, tokens would meet in running means alone with static ones.
    weights = "dual" if model == "primalformer" else "static"
    return {"num_directions": NUM_DIRECTIONS, "weights": weights}


def _task(recipe: Recipe, folder: Path | None) -> Task:
    if recipe.data.valid_fraction != 0:
        raise ValueError(
            f"valid_fraction of {recipe.task} is 0: texts have a part to validate on, "
            f"got {recipe.data.valid_fraction}"
        )
    return language_task(
        recipe.set_name,
        folder=folder,
        num_tokens=recipe.data.num_tokens,
        context_tokens=recipe.data.context_tokens,
    )


def build_language_model(recipe: Recipe, sizes: Sizes) -> LanguageModel:
    """Build a causal model that reads and writes symbols."""
    if sizes.vocab_size is None:
        raise ValueError("a language model reads symbols; the sizes have no vocab_size")
    return LanguageModel(
        sizes.vocab_size,
        attentions_of(recipe, sizes, causal=True),
        recipe.model.dim,
        recipe.model.ffn_dim,
        norm=recipe.model.norm,
        dropout=recipe.model.dropout,
        activation="relu",
    )


LANGUAGE = Domain(
    sets=LANGUAGE_SETS,
    make_task=_task,
    build_model=build_language_model,
    recipes={"paper": language_paper, "clean": language_clean},
    find=find_language,
    prepare=prepare_language,
    usage="reads a text, and prepares it",
)
