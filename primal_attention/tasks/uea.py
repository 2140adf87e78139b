"""The UEA archive of multivariate time series classification (Bagnall et al., 2018).

A set is read from its files ``<Name>_TRAIN.ts`` and ``<Name>_TEST.ts``, in ``<folder>/<Name>`` or
``<folder>``; the aeon package holds those of a few sets.
"""

import importlib.util
from pathlib import Path
from typing import Literal

from primal_attention.tasks.prepared import data_folders, name_near
from primal_attention.tasks.series import LabelledSeries, series_task
from primal_attention.tasks.task import Task
from primal_attention.tasks.ts_files import read_ts

UEA_SETS: tuple[str, ...] = (
    *("ArticularyWordRecognition", "AtrialFibrillation", "BasicMotions", "CharacterTrajectories"),
    *("Cricket", "DuckDuckGeese", "ERing", "EigenWorms", "Epilepsy", "EthanolConcentration"),
    *("FaceDetection", "FingerMovements", "HandMovementDirection", "Handwriting", "Heartbeat"),
    *("InsectWingbeat", "JapaneseVowels", "LSST", "Libras", "MotorImagery", "NATOPS", "PEMS-SF"),
    *("PenDigits", "PhonemeSpectra", "RacketSports", "SelfRegulationSCP1", "SelfRegulationSCP2"),
    *("SpokenArabicDigits", "StandWalkJump", "UWaveGestureLibrary"),
)


def uea_task(
    name: str, *, folder: Path | None = None, valid: float | Literal["test"], seed: int
) -> Task:
    """Make a classification task of a set; see ``series_task`` and ``load_uea``."""
    train, test = load_uea(name, folder)
    origin = str(find_uea(name, folder))
    return series_task(f"uea/{name}", *train, *test, valid=valid, seed=seed, origin=origin)


def load_uea(name: str, folder: Path | None = None) -> tuple[LabelledSeries, LabelledSeries]:
    """Read the official training and test parts of a set.

    Args:
        name: One of ``UEA_SETS``, or any set whose files lie in the folder.
        folder: Where to look; ``uea`` in the folder that the environment variable
            ``PRIMAL_DATA`` names, or in ``data``, by default.
    """
    if folder is not None and not Path(folder).is_dir():
        raise FileNotFoundError(
            f"folder {str(folder)!r} does not exist; name the one that holds {name}, or none, "
            "to look in the usual places"
        )
    place = find_uea(name, folder)
    if place is None:
        raise _not_found(name, data_folders("uea", folder)[0])
    train, test = (read_ts(file) for file in _files(name, place))
    channels = [len(part.series[0]) for part in (train, test)]
    if channels[0] != channels[1]:
        raise ValueError(f"{place}: {channels[0]} channels in train, {channels[1]} in test")
    return train, test


def find_uea(name: str, folder: Path | None = None) -> Path | None:
    """Return the folder of both files of a set, None where there is none."""
    places = [data_folders("uea", folder)[0] / name, data_folders("uea", folder)[0]]
    #   Importing aeon takes seconds and is not needed.
    if name in UEA_SETS and (spec := importlib.util.find_spec("aeon")) is not None:
        roots = spec.submodule_search_locations or []
        places += [Path(root) / "datasets" / "data" / name for root in roots]
    whole = (each for each in places if all(file.is_file() for file in _files(name, each)))
    return next(whole, None)


def _files(name: str, place: Path) -> list[Path]:
    return [place / f"{name}_{part}.ts" for part in ("TRAIN", "TEST")]


def _not_found(name: str, folder: Path) -> Exception:
    there = {file.stem.rpartition("_")[0] for file in folder.rglob("*_T*.ts")}
    if name not in {*UEA_SETS, *there}:
        return ValueError(
            f"name {name!r} is not a set of the UEA archive and has no files in {folder}; "
            f"did you mean one of {name_near(name, sorted({*UEA_SETS, *there}))}?"
        )
    return FileNotFoundError(
        f"{name}: no data. Put {name}_TRAIN.ts and {name}_TEST.ts, from "
        f"timeseriesclassification.com, into {folder / name}; "
        f"aeon.datasets.load_classification({name!r}, extract_path={str(folder)!r}) downloads them"
    )
