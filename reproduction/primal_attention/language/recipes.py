"""Language: perplexity of word-level models on WikiText-2, each under both protocols."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
MODELS = ("softmax", "primal_plus", "primalformer", "linear", "flow")


def recipes() -> Iterator[Recipe]:
    """Every cell of the table, one seed after the other."""
    for seed in range(SEEDS):
        for protocol in ("paper", "clean"):
            for model in MODELS:
                yield find_recipe("language/wikitext-2", model, protocol, seed)
