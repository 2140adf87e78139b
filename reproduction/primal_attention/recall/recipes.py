"""Associative recall: the share of values read back, against the number of pairs."""

from collections.abc import Iterator

from primal_attention.tasks.recall import RECALL_SETS
from primal_attention.training import Recipe, find_recipe

SEEDS = 3
FORMS = (  # a model and its options
    ("softmax", ()),
    ("primalformer_time", ()),
    ("primalformer", ()),  # dual weights
    ("linear", ()),
    ("linear", ("attention.score_norm=true", "attention.gate=true", "attention.decay=learned")),
)


def recipes() -> Iterator[Recipe]:
    """Every form on every number of pairs, one seed after the other."""
    for seed in range(SEEDS):
        for pairs in RECALL_SETS:
            for model, options in FORMS:
                yield find_recipe(f"recall/{pairs}", model, "clean", seed).with_settings(options)
