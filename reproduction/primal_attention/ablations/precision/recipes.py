"""Nystromformer on ListOps in bfloat16 and in float32: which of its runs leave chance."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3


def recipes() -> Iterator[Recipe]:
    """Both precisions of every seed, under the paper's protocol."""
    for seed in range(SEEDS):
        for precision in ("bf16", "fp32"):
            recipe = find_recipe("lra/listops", "nystrom", "paper", seed)
            yield recipe.with_settings([f"precision={precision}"])
