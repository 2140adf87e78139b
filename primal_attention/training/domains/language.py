"""Word-level language models; recipes are counted in steps of 32,768 tokens."""

from pathlib import Path
from typing import Any

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


#   Settings of length and dropout by text. Two are ours, set before any run: the paper has no model
#   of wikitext-2, a fiftieth of the other, nor of imdb (ten times over the training part).
SCHEDULES: dict[str, dict[str, Any]] = {
    "wikitext-2": {"steps": 3_200, "eval_every": 160, "dropout": 0.3},
    "wikitext-103": {"steps": 150_000, "eval_every": 3_000, "dropout": 0.1},
    "imdb": {"steps": 3_200, "eval_every": 160, "dropout": 0.3},
}


def language_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """Train as the authors did: the learning rate falls with the root of the step, no clipping.

    Their Adam decays weights apart from the gradient, which is AdamW. They work in float32.
    """
    if name not in LANGUAGE_SETS:
        raise ValueError(f"no text is called {name!r}; {nearest(name, LANGUAGE_SETS)}")
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
        attention=_options(model),
        eta=ETA if mechanism_of(model) == "primal" else 0.0,
        objective="released",
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.01,
        adam_beta2=0.98,
        batch_size=64,
        schedule="inverse_sqrt",
        warmup=WARMUP,
        clip_norm=None,
        precision="bf16",
        **SCHEDULES[name],
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
