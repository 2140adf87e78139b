"""Associative recall: a sequence lists pairs, then asks for them; the cases are generated."""

from pathlib import Path

from primal_attention.tasks import Task
from primal_attention.tasks.recall import RECALL_SETS, recall_task
from primal_attention.training.domains.domain import Domain
from primal_attention.training.domains.language import build_language_model
from primal_attention.training.recipe import Recipe


def recall_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Two layers of width 128; one setting for all models and numbers of pairs, set before runs."""
    is_dual = model in ("primalformer", "primal_plus")
    return Recipe(
        task=f"recall/{name}",
        model=model,
        protocol="clean",
        seed=seed,
        valid_fraction=0.0,
        num_tokens=512,
        num_layers=2,
        dim=128,
        num_heads=4,
        ffn_dim=512,
        norm="pre",
        dropout=0.0,
        attention={"weights": "dual"} if is_dual else {},
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.1,
        batch_size=128,
        steps=4_000,
        schedule="cosine",
        warmup=0.1,
        clip_norm=1.0,
        eval_every=500,
        precision="bf16",
    )


def _task(recipe: Recipe, folder: Path | None) -> Task:
    return recall_task(recipe.set_name, num_tokens=recipe.data.num_tokens, seed=recipe.run.seed)


RECALL = Domain(
    sets=RECALL_SETS,
    make_task=_task,
    build_model=build_language_model,
    recipes={"clean": recall_clean},
    missing="generated when it is trained on",
)
