"""Language: perplexity of word-level models on WikiText-2, each under both protocols.

After the models of the paper come the forms with positions, gates and a learned time, under the
clean protocol, and the same forms on the labelled reviews of IMDb.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
MODELS = ("softmax", "primal_plus", "primalformer", "linear", "flow")
LINEAR = ("attention.score_norm=true", "attention.gate=true", "attention.decay=learned")
FORMS = (  # a model and its options
    ("primalformer_time", ()),
    ("softmax", ("attention.rotary=true", "attention.gate=true")),
    ("softmax", ("attention.rotary=true",)),
    ("linear", LINEAR),
    ("primal_time_plus", ()),
    ("primalformer_time", ("attention.rotary=true",)),
)


def recipes() -> Iterator[Recipe]:
    """Every cell of the table, one seed after the other."""
    for seed in range(SEEDS):
        for protocol in ("paper", "clean"):
            for model in MODELS:
                yield find_recipe("language/wikitext-2", model, protocol, seed)
        for text in ("wikitext-2", "imdb"):
            for model, options in FORMS:
                yield find_recipe(f"language/{text}", model, "clean", seed).with_settings(options)
