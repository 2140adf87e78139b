"""Tasks of the Long Range Arena as small as they get, in their own files."""

import numpy as np

from primal_attention.tasks.lra import LRA, PartSizes, PreparedTask
from primal_attention.training import find_recipe

N = 23
SMALL = ["dim=8", "ffn_dim=13", "head_hidden_dim=11", "batch_size=10", "precision=fp32", "lr=0.01"]


def write_listops(folder, sizes=(49, 31, 29)):
    """Sequences of 5 to 23 times the same digit, which is the class."""
    rng = np.random.default_rng(0)
    targets = rng.integers(10, size=sum(sizes))
    lengths = rng.integers(5, N + 1, size=sum(sizes))
    tokens = np.where(np.arange(N) < lengths[:, None], targets[:, None] + 1, 0)
    prepared = PreparedTask(
        "listops", PartSizes(*sizes), tokens.astype(np.uint8), targets.astype(np.uint8)
    )
    LRA.write(folder / "listops.npz", prepared)


def write_pairs(folder, sizes=(47, 31, 29)):
    """Pairs of texts that are of the same letter or not."""
    rng = np.random.default_rng(0)
    letters = rng.integers(1, 4, size=17)
    lengths = rng.integers(5, N + 1, size=17)
    tokens = np.where(np.arange(N) < lengths[:, None], letters[:, None], 0).astype(np.uint8)
    pairs = rng.integers(17, size=(sum(sizes), 2)).astype(np.int32)
    same = letters[pairs[:, 0]] == letters[pairs[:, 1]]
    prepared = PreparedTask(
        "retrieval-imdb", PartSizes(*sizes), tokens, same.astype(np.uint8), pairs
    )
    LRA.write(folder / "retrieval-imdb.npz", prepared)


def small_recipe(name="listops", model="primalformer", protocol="paper", *settings):
    options = ["attention.num_directions=3"] if model.startswith("primal") else []
    recipe = find_recipe(f"lra/{name}", model, protocol)
    return recipe.with_settings([*SMALL, "steps=37", "eval_every=7", *options, *settings])
