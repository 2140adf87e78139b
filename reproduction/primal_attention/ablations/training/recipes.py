"""Find what helps PrimalFormer on UEA time series: one change at a time, then some together.

Under the clean protocol; a change is judged by its validation accuracy, the column ``valid``.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SETS = (
    "JapaneseVowels",
    "Handwriting",
    "UWaveGestureLibrary",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
)
SEEDS = 3
JITTER, DROPOUT = "attention.landmark_jitter=0.6", "attention.landmark_dropout=0.5"
CHANGES: tuple[tuple[str, ...], ...] = (
    (),
    ("eta=0",),
    ("objective=explained_energy", "eta=0.01"),
    ("objective=explained_energy", "eta=0.1"),
    ("pooling=mean",),
    (DROPOUT,),
    (JITTER,),
    (DROPOUT, JITTER),
    ("lr=0.0003",),
    ("lr=0.003",),
    ("schedule=one_cycle", "warmup=0.1"),
    ("norm=pre",),
    ("dropout=0.3",),
    ("kernel_size=5",),
    ("kernel_size=9",),
    ("kernel_size=9", "pooling=mean"),
    ("kernel_size=9", DROPOUT, JITTER),
    ("kernel_size=9", "pooling=mean", DROPOUT, JITTER),
    ("kernel_size=9", "schedule=one_cycle", "warmup=0.1"),
    ("kernel_size=9", "pooling=mean", "schedule=one_cycle", "warmup=0.1"),
    ("pooling=mean", "norm=pre", "schedule=one_cycle", "warmup=0.1"),
    ("kernel_size=9", "pooling=mean", "norm=pre", "schedule=one_cycle", "warmup=0.1"),
)


def recipes() -> Iterator[Recipe]:
    """Every change on every set, the seeds outermost."""
    for seed in range(SEEDS):
        for name in SETS:
            plain = find_recipe(f"uea/{name}", "primalformer", "clean", seed)
            for change in CHANGES:
                yield plain.with_settings(change)
