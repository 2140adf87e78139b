"""The defaults of the time series estimators: a small PrimalFormer, one change at a time.

Under the clean protocol; a change is judged by its validation accuracy, the column ``valid``.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SETS = (
    "SelfRegulationSCP2",
    "SelfRegulationSCP1",
    "UWaveGestureLibrary",
    "Handwriting",
    "JapaneseVowels",
)
SEEDS, FINAL_SEEDS = 3, 5
PLAIN = ("dim=128", "ffn_dim=256", "pooling=mean", "eta=0", "patience=none")
CYCLE = ("schedule=one_cycle", "warmup=0.1")
MIDDLE = (*CYCLE, "kernel_size=9")
DROPOUT, JITTER = "attention.landmark_dropout=0.5", "attention.landmark_jitter=0.6"
CHANGES: tuple[tuple[str, ...], ...] = (
    (),
    CYCLE,
    ("kernel_size=9",),
    (*CYCLE, "kernel_size=5"),
    MIDDLE,
    (*CYCLE, "kernel_size=15"),
    (*MIDDLE, "pooling=flatten"),
    (*MIDDLE, "pooling=class_token"),
    (*MIDDLE, "lr=0.0003"),
    (*MIDDLE, "lr=0.003"),
    (*MIDDLE, "dropout=0.3"),
    (*MIDDLE, DROPOUT),
    (*MIDDLE, JITTER),
    (*MIDDLE, DROPOUT, JITTER),
    (*MIDDLE, "objective=explained_energy", "eta=0.01"),
    (*MIDDLE, "objective=explained_energy", "eta=0.1"),
    (*MIDDLE, "eta=0.1"),
    (*MIDDLE, "norm=pre"),
    (*MIDDLE, "optimizer=adamw", "weight_decay=0.05"),
    (*MIDDLE, "dim=64", "ffn_dim=128"),
    (*MIDDLE, "dim=256", "ffn_dim=512"),
    (*MIDDLE, "dim=512", "ffn_dim=2048"),
    (*MIDDLE, "num_layers=3"),
    (*MIDDLE, "dropout=0.3", DROPOUT, JITTER),
    (*MIDDLE, "norm=pre", DROPOUT, JITTER),
    (*CYCLE, "kernel_size=15", DROPOUT, JITTER),
)

CHOSEN = (*MIDDLE, DROPOUT, JITTER)  # by validation accuracy, before any run with a refit


def recipes() -> Iterator[Recipe]:
    """Every change on every set, the seeds outermost; then what was chosen, trained anew."""
    for seed in range(SEEDS):
        for name in SETS:
            for change in CHANGES:
                yield changed(name, seed, *change)
    for seed in range(FINAL_SEEDS):
        for name in SETS:
            yield changed(name, seed, *CHOSEN, "refit=true")


def changed(name: str, seed: int, *change: str) -> Recipe:
    """The small PrimalFormer on a set, with changes."""
    plain = find_recipe(f"uea/{name}", "primalformer", "clean", seed)
    return plain.with_settings([*PLAIN, *change])
