"""The UEA time series."""

from pathlib import Path
from typing import Literal

from primal_attention.tasks import UEA_SETS, Task, find_uea, uea_task
from primal_attention.training.domains.domain import Directions, Domain, with_directions
from primal_attention.training.recipe import Recipe

_RELEASED: dict[str, dict[str, Directions]] = {
    "primalformer": {
        "EthanolConcentration": Directions(30, 0.1, 10),
        "FaceDetection": Directions(20, 0.1, 5),
        "Handwriting": Directions(30, 0.2, 5),
        "Heartbeat": Directions(30, 0.5, 10),
        "JapaneseVowels": Directions(40, 0.5, 5),
        "PEMS-SF": Directions(40, 0.1, 5),
        "SelfRegulationSCP1": Directions(30, 0.5, 10),
        "SelfRegulationSCP2": Directions(20, 0.0, 10),
        "SpokenArabicDigits": Directions(20, 0.1, 5),
        "UWaveGestureLibrary": Directions(20, 0.0, 10),
    },
    "primal_plus": {
        "EthanolConcentration": Directions(40, 0.2, 10),
        "FaceDetection": Directions(40, 0.2, 5),
        "Handwriting": Directions(20, 0.5, 5),
        "Heartbeat": Directions(40, 0.5, 10),
        "JapaneseVowels": Directions(30, 0.2, 5),
        "PEMS-SF": Directions(40, 0.0, 5),
        "SelfRegulationSCP1": Directions(30, 0.2, 10),
        "SelfRegulationSCP2": Directions(20, 0.2, 10),
        "SpokenArabicDigits": Directions(30, 0.2, 5),
        "UWaveGestureLibrary": Directions(40, 0.1, 10),
    },
}
_OTHER_SETS = Directions(30, 0.1, 10)  # of the paper's grid; set before any run, for all sets alike


def uea_paper(name: str, model: str, seed: int = 0) -> Recipe:
    """Time series as the authors trained them: the best epoch on the test cases is reported."""
    recipe = Recipe(
        task=f"uea/{name}",
        model=model,
        protocol="paper",
        seed=seed,
        valid_fraction=None,
        pooling="flatten",
        mask_attention=False,
        optimizer="adam" if name == "SpokenArabicDigits" else "radam",
        epochs=400 if name == "PEMS-SF" else 100,
        eval_every=2,
    )
    return with_directions(recipe, _RELEASED.get(model, {}).get(name, _OTHER_SETS))


def uea_clean(name: str, model: str, seed: int = 0) -> Recipe:
    """Use one setting for all sets, and choose on cases held out of the training ones."""
    recipe = Recipe(
        task=f"uea/{name}",
        model=model,
        protocol="clean",
        seed=seed,
        pooling="flatten",
        epochs=100,
        patience=30,
    )
    return with_directions(recipe, _OTHER_SETS)


def _task(recipe: Recipe, folder: Path | None) -> Task:
    if recipe.data.valid_fraction == 0:
        raise ValueError("valid_fraction must be in (0, 1) or none: UEA has no validation cases")
    valid: float | Literal["test"] = recipe.data.valid_fraction or "test"
    return uea_task(recipe.set_name, folder=folder, valid=valid, seed=recipe.run.seed)


UEA = Domain(
    sets=UEA_SETS,
    make_task=_task,
    recipes={"paper": uea_paper, "clean": uea_clean},
    find=find_uea,
)
