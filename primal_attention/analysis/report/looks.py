"""What a report finds out by looking at data: predictions, spectra, the distance from the KSVD."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from primal_attention.analysis.capture import find_layers
from primal_attention.analysis.duality import Duality, duality
from primal_attention.analysis.report.run import Run
from primal_attention.analysis.spectrum import Spectrum, spectrum
from primal_attention.attention.primal import PrimalAttention
from primal_attention.tasks import CLASSIFICATION, Cases, Task
from primal_attention.training.domains import task_of

Track = Callable[[Sequence[Tensor], str], Iterable[Tensor]]
"""Passes portions of work on, with a word about them; shows how far they are."""
MOST_PREDICTED = 2000
_BATCH_SIZE = 8
_NOT_AT_HAND = (OSError, ValueError, ImportError, RuntimeError)


@dataclass(frozen=True)
class Predictions:
    """What a classifier says of test cases."""

    confusion: Tensor  # [classes, classes]: cases of a class (rows) by what they were taken for
    labels: tuple[str, ...]
    num_cases: int
    of: int  # all test cases

    @property
    def accuracy(self) -> float:
        """In per cent."""
        return 100 * float(self.confusion.diagonal().sum()) / self.num_cases


@dataclass(frozen=True)
class Looks:
    """What was found; ``why_not`` says why something was not, by the name of the part."""

    num_cases: int = 0
    predictions: Predictions | None = None
    spectrum: Spectrum | None = None
    duality: Duality | None = None
    why_not: Mapping[str, str] | None = None

    def reason(self, part: str) -> str:
        """Why a part is missing."""
        return (self.why_not or {}).get(part, "")


def look(run: Run, data: Path | None, cases: int, track: Track) -> Looks:
    """Run the model over test cases, evenly spaced over all of them.

    Args:
        run: Of which the data are to be those that it was trained for.
        data: Their folder; where it is None and they are not at hand, that is said.
        cases: How many to look at; predictions take more.
        track: Is handed the batches.
    """
    if cases == 0:
        return _without("no cases were asked for")
    try:
        task = task_of(run.recipe, data)
        _check_same_data(run, task)
    except _NOT_AT_HAND as error:
        if data is not None:
            raise
        return _without(f"the data are not at hand: {error}")
    why_not: dict[str, str] = {}
    found = {
        "predictions": _predictions(run, task, track, why_not),
        "spectrum": _spectrum(run, task.test, cases, track, why_not),
        "duality": _duality(run, task.test, cases, track, why_not),
    }
    return Looks(min(cases, len(task.test)), **found, why_not=why_not)  # type: ignore[arg-type]


def _without(reason: str) -> Looks:
    return Looks(why_not=dict.fromkeys(("predictions", "spectrum", "duality"), reason))


def _predictions(run: Run, task: Task, track: Track, why_not: dict[str, str]) -> Predictions | None:
    if task.goal is not CLASSIFICATION:
        why_not["predictions"] = f"{run.recipe.task} is no classification"
        return None
    number, sizes = min(len(task.test), MOST_PREDICTED), run.facts["sizes"]
    confusion = torch.zeros(sizes["num_outputs"], sizes["num_outputs"], dtype=torch.int64)
    for indices in track(_portions(len(task.test), number), "predictions"):
        batch = task.test[indices]
        with torch.no_grad():
            taken_for = run.model(**batch.inputs).argmax(-1)
        ones = torch.ones_like(batch.target)
        confusion.index_put_((batch.target, taken_for), ones, accumulate=True)
    labels = task.labels or tuple(map(str, range(len(confusion))))
    return Predictions(confusion, labels, number, len(task.test))


def _spectrum(
    run: Run, cases: Cases, number: int, track: Track, why_not: dict[str, str]
) -> Spectrum | None:
    try:
        return spectrum(run.model, _inputs(cases, number, track, "spectra"))
    except ValueError as error:
        why_not["spectrum"] = str(error)
        return None


def _duality(
    run: Run, cases: Cases, number: int, track: Track, why_not: dict[str, str]
) -> Duality | None:
    try:
        layers = find_layers(run.model).found
    except ValueError:
        layers = []
    if not any(isinstance(each.mechanism, PrimalAttention) for each in layers):
        why_not["duality"] = "the model has no Primal layer"
        return None
    return duality(run.model, _inputs(cases, number, track, "duality"))


def _inputs(cases: Cases, number: int, track: Track, what: str) -> Iterator[dict[str, Tensor]]:
    for indices in track(_portions(len(cases), number), what):
        yield cases[indices].inputs


def _portions(length: int, number: int) -> Sequence[Tensor]:
    """Indices evenly spaced over all cases, which may be sorted by class, in batches."""
    number = min(number, length)
    indices = torch.arange(number) * length // number
    return torch.split(indices, _BATCH_SIZE)


def _check_same_data(run: Run, task: Task) -> None:
    """The data are those that the model was trained on: sizes, classes and statistics."""
    encoding = task.encoding.to_dict() if task.encoding else None
    ours = asdict(task.sizes), list(task.labels), encoding
    theirs = run.facts["sizes"], list(run.facts["labels"]), run.facts["encoding"]
    if not _same(ours, theirs):
        raise ValueError(f"the data of {task.name} are not those that the model was trained on")


def _same(ours: Any, theirs: Any) -> bool:
    """Whether plain values agree, numbers up to rounding."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return bool(np.isclose(ours, theirs))
    return bool(ours == theirs)
