"""Models whose accuracy is measured on noisy and shifted test cases by reproduction/robustness.py.

Attention-BN and -SH, on softmax and on linear attention, their bases, and Primal-Attention.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
SETS = ("UWaveGestureLibrary", "JapaneseVowels")
SCALED = "attention.scales=[1,1,2,2,4,4,8,8]"
MODELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("softmax", ()),
    ("softmax_bn", ()),
    ("softmax_sh", ()),
    ("softmax_bn_sh", ()),
    ("linear", ()),
    ("linear_bn", ()),
    ("linear", (SCALED,)),
    ("linear_bn", (SCALED,)),
    ("primalformer", ()),
)


def recipes() -> Iterator[Recipe]:
    """Every model on both sets, the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            for model, change in MODELS:
                yield find_recipe(f"uea/{name}", model, "clean", seed).with_settings(change)
