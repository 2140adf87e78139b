"""Table 5: DeiT with Primal-Attention, on 100 classes of Tiny-ImageNet, under both protocols."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
MODELS = ("softmax", "primal_plus", "primalformer")


def recipes() -> Iterator[Recipe]:
    """Every cell of the row that we can run, one seed after the other."""
    for seed in range(SEEDS):
        for protocol in ("clean", "paper"):
            for model in MODELS:
                yield find_recipe("images/tiny-imagenet-100", model, protocol, seed)
