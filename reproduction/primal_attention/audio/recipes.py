"""Raw sound: spoken digits, of known and of unknown speakers, and ESC-50 by its five folds."""

from collections.abc import Iterator

from primal_attention.training import Recipe, find_recipe

MODELS = ("primalformer_time", "softmax", "linear", "primalformer")
SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
FOLDS = range(1, 6)


def recipes() -> Iterator[Recipe]:
    """Every model on the official parts, then on each speaker and each fold held out."""
    names = ["digits", *(f"digits-{each}" for each in SPEAKERS)]
    names += [f"esc50-fold{each}" for each in FOLDS]
    for name in names:
        for model in MODELS:
            yield find_recipe(f"audio/{name}", model, "clean")
