"""The UEA archive of multivariate time series classification (Bagnall et al., 2018).

A set is read from the first of these that is there: a prepared file ``<folder>/<Name>.npz``; the
files ``<Name>_TRAIN.ts`` and ``<Name>_TEST.ts`` in ``<folder>/<Name>`` or ``<folder>``; the few
sets that the aeon package holds; the archive itself, downloaded by aeon. In a prepared file the
values of all cases stand one after the other, beside the shape and the label of each.
"""

import difflib
import importlib
import importlib.util
import tempfile
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from primal_attention.array_files import ArrayFile
from primal_attention.tasks.prepared import PreparedSets
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
PARTS = ("train", "test")

TrainAndTest: TypeAlias = tuple[LabelledSeries, LabelledSeries]


def uea_task(
    name: str, *, folder: Path | None = None, valid: float | Literal["test"], seed: int
) -> Task:
    """Make a classification task of a set; see ``series_task`` and ``load_uea``."""
    train, test = load_uea(name, folder)
    origin = str(find_uea(name, folder))
    return series_task(f"uea/{name}", *train, *test, valid=valid, seed=seed, origin=origin)


class UeaSets(PreparedSets[TrainAndTest]):
    """The sets of the archive, and any other whose files lie in the folder."""

    domain, format = "uea", "primal-attention series, version 1"
    kind, remedy = "data set", "prepare_uea({name!r}, <folder of the .ts files>)"
    compressed, looks_around = True, False

    def load(self, name: str, folder: Path | None = None) -> TrainAndTest:
        """Read or download the official training and test parts of a set.

        Args:
            name: One of ``UEA_SETS``, or any set whose files lie in the folder.
            folder: Where to look; ``uea`` in the folder that the environment variable
                ``PRIMAL_DATA`` names, or in ``data``, by default. What aeon holds is no substitute
                for one that is given and is not there.
        """
        held = any(each.is_dir() for each in _inside_aeon(name))
        if held and folder is not None and not Path(folder).is_dir():
            raise FileNotFoundError(
                f"folder {str(folder)!r} does not exist; name the one that holds {name}, or none, "
                "to look in the usual places"
            )
        return super().load(name, folder)

    def _find_files(self, name: str, folder: Path | None) -> Path | None:
        places = self._places(name, folder)
        whole = (each for each in places if all(file.is_file() for file in _files(name, each)))
        return next(whole, None)

    def _read_files(self, name: str, place: Path) -> TrainAndTest:
        files = _files(name, place)
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"{name}: {file} is missing; both parts of a set are needed"
                )
        train, test = (read_ts(file) for file in files)
        _check_channels(place, train, test)
        return train, test

    def _fetch(self, name: str, folder: Path | None) -> TrainAndTest:
        for place in self._places(name, folder):
            if any(file.is_file() for file in _files(name, place)):
                return self._read_files(name, place)  # which says which of them is missing
        folder = self.folders(folder)[0]
        _check_known(name, folder)
        try:
            aeon = importlib.import_module("aeon.datasets")
        except ImportError as error:
            reason = "aeon would download them: pip install 'primal-attention[timeseries]'"
            raise FileNotFoundError(f"{self._advice(name, folder)} ({reason})") from error
        #   Not in the folder, which a failed download would leave behind, empty.
        there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
        with tempfile.TemporaryDirectory(dir=there, prefix=f".{name}.") as incoming:
            try:
                aeon.load_classification(name, split="train", extract_path=incoming)
                parts = self._read_files(name, Path(incoming) / name)
            except (OSError, ValueError) as error:
                reason = f"the download failed: {error}"
                raise FileNotFoundError(f"{self._advice(name, folder)} ({reason})") from error
            (folder / name).mkdir(parents=True, exist_ok=True)
            for file in _files(name, Path(incoming) / name):
                file.replace(folder / name / file.name)
        return parts

    def _places(self, name: str, folder: Path | None) -> list[Path]:
        folder = self.folders(folder)[0]
        return [folder / name, folder, *_inside_aeon(name)]

    def _pack(self, found: TrainAndTest) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        for name, part in zip(PARTS, found, strict=True):
            shapes = [case.shape for case in part.series]
            arrays[f"{name}_shapes"] = np.array(shapes, dtype=np.int64)
            arrays[f"{name}_values"] = np.concatenate([case.ravel() for case in part.series])
            arrays[f"{name}_labels"] = part.labels
        return arrays

    def _unpack(self, arrays: ArrayFile, path: Path, name: str) -> TrainAndTest:
        train, test = (
            _unpacked(*(arrays[f"{part}_{key}"] for key in ("shapes", "values", "labels")))
            for part in PARTS
        )
        _check_channels(path, train, test)
        return train, test

    def _advice(self, name: str, folder: Path | None) -> str:
        place = self.folders(folder)[0]
        return (
            f"{name}: no data. Put {name}_TRAIN.ts and {name}_TEST.ts, from "
            f"timeseriesclassification.com, into {place / name}, or a prepared {name}.npz into "
            f"{place}"
        )


UEA = UeaSets()
find_uea, load_uea, prepare_uea = UEA.find, UEA.load, UEA.prepare


def _files(name: str, place: Path) -> list[Path]:
    return [place / f"{name}_{part}.ts" for part in ("TRAIN", "TEST")]


def _inside_aeon(name: str) -> list[Path]:
    """Where the aeon package would hold the set; importing aeon takes seconds and is not needed."""
    spec = importlib.util.find_spec("aeon") if name in UEA_SETS else None
    roots = (spec.submodule_search_locations or []) if spec else []
    return [Path(root) / "datasets" / "data" / name for root in roots]


def _check_known(name: str, folder: Path) -> None:
    if name in UEA_SETS:
        return
    files = (*folder.glob("*_TRAIN.ts"), *folder.glob("*/*_TRAIN.ts"), *folder.glob("*.npz"))
    known = sorted({*UEA_SETS, *(file.stem.removesuffix("_TRAIN") for file in files)})
    near = difflib.get_close_matches(name, known, cutoff=0.5) or known
    raise ValueError(
        f"name {name!r} is not a set of the UEA archive and has no files in {folder}; "
        f"did you mean one of {', '.join(near)}?"
    )


def _check_channels(path: Path, train: LabelledSeries, test: LabelledSeries) -> None:
    numbers = [len(part.series[0]) for part in (train, test)]
    if numbers[0] != numbers[1]:
        raise ValueError(f"{path}: {numbers[0]} channels in train, {numbers[1]} in test")


def _unpacked(
    shapes: NDArray[np.int64], values: NDArray[np.float32], labels: NDArray[np.str_]
) -> LabelledSeries:
    """The cases of one part; the arrays have to fit each other."""
    if shapes.dtype != np.int64 or shapes.ndim != 2 or shapes.shape[1] != 2 or not len(shapes):
        raise ValueError("the shapes of its cases are wrong")
    # one larger than all values is wrong, and its product could be too large a number
    if shapes.min() < 1 or shapes.max() > values.size or np.ptp(shapes[:, 0]):
        raise ValueError("the shapes of its cases are wrong")
    sizes = shapes.prod(axis=1)
    if values.dtype != np.float32 or values.shape != (sum(sizes.tolist()),):
        raise ValueError("its values do not fit the shapes of its cases")
    if labels.dtype.kind != "U" or labels.shape != (len(shapes),):
        raise ValueError("its labels are not one string a case")
    cases = np.split(values, np.cumsum(sizes)[:-1])
    series = [case.reshape(shape) for case, shape in zip(cases, shapes, strict=True)]
    return LabelledSeries(series, labels)
