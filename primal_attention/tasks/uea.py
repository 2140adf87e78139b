"""The UEA archive of multivariate time series classification (Bagnall et al., 2018).

A set is read from the first of these that is there: a prepared file ``<folder>/<Name>.npz``; the
files ``<Name>_TRAIN.ts`` and ``<Name>_TEST.ts`` in ``<folder>/<Name>`` or ``<folder>``; the few
sets that the aeon package holds; the archive itself, downloaded by aeon.
"""

import difflib
import importlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Literal

from primal_attention.tasks.prepared import (
    TrainAndTest,
    check_channels,
    read_prepared,
    write_prepared,
)
from primal_attention.tasks.series import series_task
from primal_attention.tasks.task import Task
from primal_attention.tasks.ts_files import read_ts

UEA_SETS: tuple[str, ...] = (
    "ArticularyWordRecognition",
    "AtrialFibrillation",
    "BasicMotions",
    "CharacterTrajectories",
    "Cricket",
    "DuckDuckGeese",
    "ERing",
    "EigenWorms",
    "Epilepsy",
    "EthanolConcentration",
    "FaceDetection",
    "FingerMovements",
    "HandMovementDirection",
    "Handwriting",
    "Heartbeat",
    "InsectWingbeat",
    "JapaneseVowels",
    "LSST",
    "Libras",
    "MotorImagery",
    "NATOPS",
    "PEMS-SF",
    "PenDigits",
    "PhonemeSpectra",
    "RacketSports",
    "SelfRegulationSCP1",
    "SelfRegulationSCP2",
    "SpokenArabicDigits",
    "StandWalkJump",
    "UWaveGestureLibrary",
)
PARTS = ("TRAIN", "TEST")


def uea_task(
    name: str, *, folder: Path | None = None, valid: float | Literal["test"], seed: int
) -> Task:
    """A set of the archive as a classification task; see ``series_task`` and ``load_uea``."""
    train, test = load_uea(name, folder)
    origin = str(find_uea(name, folder))
    return series_task(f"uea/{name}", *train, *test, valid=valid, seed=seed, origin=origin)


def load_uea(name: str, folder: Path | None = None) -> TrainAndTest:
    """The official training and test parts of a set.

    Args:
        name: One of ``UEA_SETS``, or any set whose files lie in the folder.
        folder: Where to look; ``uea`` in the folder that the environment variable ``PRIMAL_DATA``
            names, or in ``data``, unless told. What aeon holds is no substitute for one that is
            told and is not there.
    """
    held = any(each.is_dir() for each in _inside_aeon(name))
    if held and folder is not None and not Path(folder).is_dir():
        raise FileNotFoundError(
            f"folder {str(folder)!r} does not exist; name the one that holds {name}, or none, "
            "to look in the usual places"
        )
    folder = uea_folder(folder)
    prepared = folder / f"{name}.npz"
    return read_prepared(prepared) if prepared.is_file() else _read_files(name, folder)


def find_uea(name: str, folder: Path | None = None) -> Path | None:
    """Where ``load_uea`` would read a set from; None where it would have to be downloaded."""
    folder = uea_folder(folder)
    prepared = folder / f"{name}.npz"
    if prepared.is_file():
        return prepared
    places = (folder / name, folder, *_inside_aeon(name))
    return next((each for each in places if all(f.is_file() for f in _files(name, each))), None)


def prepare_uea(name: str, folder: Path | None = None, out: Path | None = None) -> Path:
    """Write a set to ``<out>/<Name>.npz``, which loads fast and without any other package.

    Args:
        name: As for ``load_uea``.
        folder: Where its files are; an older prepared file there is not read.
        out: Where to write; the folder itself unless told.
    """
    folder = uea_folder(folder)
    parts = _read_files(name, folder)
    path = (folder if out is None else Path(out)) / f"{name}.npz"
    write_prepared(path, parts)
    return path


def uea_folder(folder: Path | None = None) -> Path:
    """The folder that is given, else ``uea`` where ``PRIMAL_DATA`` points, else ``data/uea``."""
    return Path(os.environ.get("PRIMAL_DATA", "data")) / "uea" if folder is None else Path(folder)


def _read_files(name: str, folder: Path) -> TrainAndTest:
    """Both parts from their files, wherever these are."""
    for place in (folder / name, folder, *_inside_aeon(name)):
        if any(file.is_file() for file in _files(name, place)):
            return _read_place(name, place)
    if name not in UEA_SETS:
        known = sorted({*UEA_SETS, *_names_in(folder)})
        near = difflib.get_close_matches(name, known, cutoff=0.5) or known
        raise ValueError(
            f"name {name!r} is not a set of the UEA archive and has no files in {folder}; "
            f"did you mean one of {', '.join(near)}?"
        )
    return _download(name, folder)


def _files(name: str, place: Path) -> list[Path]:
    return [place / f"{name}_{part}.ts" for part in PARTS]


def _names_in(folder: Path) -> set[str]:
    """The sets whose files lie in the folder."""
    files = (*folder.glob("*_TRAIN.ts"), *folder.glob("*/*_TRAIN.ts"), *folder.glob("*.npz"))
    return {file.stem.removesuffix("_TRAIN") for file in files}


def _inside_aeon(name: str) -> list[Path]:
    """Where the aeon package would hold the set; importing aeon takes seconds and is not needed."""
    spec = importlib.util.find_spec("aeon") if name in UEA_SETS else None
    roots = (spec.submodule_search_locations or []) if spec else []
    return [Path(root) / "datasets" / "data" / name for root in roots]


def _read_place(name: str, place: Path) -> TrainAndTest:
    """Both parts, from the folder that holds at least one of the files."""
    files = _files(name, place)
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{name}: {file} is missing; both parts of a set are needed")
    train, test = (read_ts(file) for file in files)
    check_channels(place, train, test)
    return train, test


def _download(name: str, folder: Path) -> TrainAndTest:
    """Both parts from the archive; the files are put in place once they are whole."""
    try:
        aeon = importlib.import_module("aeon.datasets")
    except ImportError as error:
        reason = "aeon would download them: pip install 'primal-attention[timeseries]'"
        raise FileNotFoundError(_what_to_do(name, folder, reason)) from error
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}.") as incoming:
        try:
            aeon.load_classification(name, split="train", extract_path=incoming)
            parts = _read_place(name, Path(incoming) / name)
        except (OSError, ValueError) as error:
            reason = f"the download failed: {error}"
            raise FileNotFoundError(_what_to_do(name, folder, reason)) from error
        (folder / name).mkdir(exist_ok=True)
        for file in _files(name, Path(incoming) / name):
            file.replace(folder / name / file.name)
    return parts


def _what_to_do(name: str, folder: Path, reason: str) -> str:
    return (
        f"{name}: no data. Put {name}_TRAIN.ts and {name}_TEST.ts, from "
        f"timeseriesclassification.com, into {folder / name}, or a prepared {name}.npz into "
        f"{folder} ({reason})"
    )
