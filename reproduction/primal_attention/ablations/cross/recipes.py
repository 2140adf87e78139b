"""Cross-attention of different mechanisms in the same decoder; trained by reproduction/cross.py."""

from collections.abc import Iterator

from primal_attention.training.recipe import Recipe

SEEDS = 3
STEPS = {"reverse": 4000, "forecast": 1500}
MECHANISMS: tuple[tuple[str, dict[str, object]], ...] = (
    ("softmax", {}),
    ("linear", {}),
    ("primalformer", {"weights": "sampled", "num_directions": 30, "max_tokens": 32}),
    ("primalformer", {"weights": "dual", "num_directions": 30}),
)


def recipes() -> Iterator[Recipe]:
    """Every mechanism on both tasks, the seeds outermost."""
    for seed in range(SEEDS):
        for task in STEPS:
            for model, options in MECHANISMS:
                yield cross(task, model, options, seed)


def cross(task: str, model: str, options: dict[str, object], seed: int) -> Recipe:
    """A small encoder-decoder, trained in steps."""
    return Recipe(
        task=f"cross/{task}",
        model=model,
        seed=seed,
        valid_fraction=0.0,
        dim=64,
        num_heads=4,
        ffn_dim=128,
        dropout=0.0,
        attention=options,
        optimizer="adamw",
        batch_size=64,
        steps=STEPS[task],
        schedule="one_cycle",
        warmup=0.1,
        eval_every=100,
    )
