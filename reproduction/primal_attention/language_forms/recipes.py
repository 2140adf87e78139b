"""Language with positions, gates and a learned time: WikiText-2 and the labelled IMDb reviews."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
LINEAR = ("attention.score_norm=true", "attention.gate=true", "attention.decay=learned")
FORMS = (  # a model and its options
    ("primalformer_time", ()),
    ("softmax", ("attention.rotary=true", "attention.gate=true")),
    ("softmax", ("attention.rotary=true",)),
    ("linear", LINEAR),
    ("flow", ()),
    ("primal_time_plus", ()),
    ("primalformer_time", ("attention.rotary=true",)),
)


def recipes() -> Iterator[Recipe]:
    """List every form on both texts under the clean protocol, one seed after the other."""
    for seed in range(SEEDS):
        for text in ("wikitext-2", "imdb"):
            for model, options in FORMS:
                yield find_recipe(f"language/{text}", model, "clean", seed).with_settings(options)
