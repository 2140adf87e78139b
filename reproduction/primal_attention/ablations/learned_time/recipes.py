"""The parts of the layer with a learned time, one changed at a time, on a text and on pixels.

The first entry of a task is the layer itself; every other one differs from it by what it names. On
pixels the layer has rotary positions; both tasks are trained under the clean protocol.
"""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

SEEDS = 3
TASKS = {"language/wikitext-2": (), "lra/image": ("attention.rotary=true", "lr=0.0005")}
CHANGES = (
    (),
    ("attention.decay=none",),
    ("attention.decay=fixed",),
    ("attention.gate=false",),
    ("attention.score_norm=false",),
    ("attention.feature_map=cosine",),
    ("attention.feature_map=elu",),
    ("attention.scores=e", "attention.num_directions=64"),
    ("attention.scores=r", "attention.num_directions=64"),
    ("attention.num_directions=16",),
    ("attention.num_directions=64",),
    ("eta=0.1", "objective=released"),
    ("eta=0.1", "objective=released_batch"),
    ("eta=0.000001", "objective=zero"),
)
ROTARY = {"language/wikitext-2": "true", "lra/image": "false"}  # the other way round


def recipes() -> Iterator[Recipe]:
    """Every change on both tasks, one seed after the other."""
    for seed in range(SEEDS):
        for task, settings in TASKS.items():
            plain = find_recipe(task, "primalformer_time", "clean", seed).with_settings(settings)
            for change in (*CHANGES, (f"attention.rotary={ROTARY[task]}",)):
                yield plain.with_settings(change)
