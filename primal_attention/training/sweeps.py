"""Search for settings: trials of one study that any number of processes share.

A trial is a run in the directory of its settings. The lock of that directory says whether a process
is at work there, so a trial that was interrupted or killed is taken up again where it was. The
objective is the metric of the cases that choose the round; the test cases have no say.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from primal_attention.atomic_files import HeldError
from primal_attention.extras import needing
from primal_attention.models.stacks import has_objective, mechanism_of
from primal_attention.training.recipe import Recipe

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

Choices = Mapping[str, Sequence[Any]]
Ranges = Mapping[str, tuple[float, float, str]]

PAPER_GRID: Choices = {"attention.num_directions": (20, 30, 40), "eta": (0.1, 0.2, 0.5)}
SAMPLERS = ("grid", "tpe")
JOURNAL = "study.log"


@dataclass(frozen=True)
class Space:
    """Search space: values to choose from, and ranges."""

    choices: Choices
    ranges: Ranges

    def suggest(self, trial: Trial) -> list[str]:
        """Suggest the settings of a trial, as ``--set`` reads them."""
        values: dict[str, Any] = {
            name: trial.suggest_categorical(name, list(values))
            for name, values in self.choices.items()
        }
        for name, (low, high, scale) in self.ranges.items():
            values[name] = trial.suggest_float(name, low, high, log=scale == "log")
        return as_settings(values)

    @property
    def grid(self) -> list[dict[str, Any]]:
        """All combinations of the values to choose from."""
        combinations = itertools.product(*self.choices.values())
        return [dict(zip(self.choices, each, strict=True)) for each in combinations]


_POOLINGS = ("mean", "class_token", "flatten")
_PLAIN_SPACE = Space({"pooling": _POOLINGS}, {"lr": (1e-4, 5e-3, "log"), "dropout": (0.0, 0.5, "")})
_TIME_SPACE = Space(
    {**_PLAIN_SPACE.choices, "attention.num_directions": (10, 20, 30, 40, 50, 60)},
    {**_PLAIN_SPACE.ranges, "eta": (1e-3, 1.0, "log")},
)
_PRIMAL_SPACE = Space(
    _TIME_SPACE.choices,
    {
        **_TIME_SPACE.ranges,
        "attention.landmark_dropout": (0.0, 0.5, ""),
        "attention.landmark_jitter": (0.0, 1.0, ""),
    },
)
_SPACES = {"primal": _PRIMAL_SPACE, "primal_time": _TIME_SPACE}


def space_of(sampler: str, model: str) -> Space:
    """Return the paper's grid or the ranges of a free search, as far as the model has them."""
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    if sampler == "tpe":
        return _SPACES.get(mechanism_of(model), _PLAIN_SPACE)
    if not has_objective(model):
        raise ValueError(
            f"the grid is over num_directions and eta, which {model} does not have; use "
            "--sampler tpe"
        )
    return Space(PAPER_GRID, {})


def as_settings(values: Mapping[str, Any]) -> list[str]:
    """Values by name as ``key=value``."""
    return [f"{name}={value}" for name, value in values.items()]


def open_study(folder: Path, recipe: Recipe, space: Space, *, higher_is_better: bool) -> Study:
    """Open the study in a folder, or make it; it must be of this recipe."""
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # whoever runs the trials tells of them
    folder.mkdir(parents=True, exist_ok=True)
    file = optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
    sampler = optuna.samplers.TPESampler() if space.ranges else optuna.samplers.RandomSampler()
    study: Study = optuna.create_study(
        study_name=folder.name,
        storage=optuna.storages.JournalStorage(file),
        sampler=sampler,
        direction="maximize" if higher_is_better else "minimize",
        load_if_exists=True,
    )
    _check_same(study, json.loads(recipe.to_json()) | {"space": repr(space)})
    if not space.ranges:
        for point in space.grid:
            study.enqueue_trial(point, skip_if_exists=True)
    return study


def _check_same(study: Study, facts: Mapping[str, Any]) -> None:
    """Raise unless the study is about the same; a new one is from now on."""
    found = study.user_attrs.get("facts", facts)
    changed = [f"{name}={found.get(name)!r}" for name in facts if found.get(name) != facts[name]]
    if changed:
        raise ValueError(
            f"the study {study.study_name!r} is about other settings ({', '.join(changed)}); "
            "choose another name"
        )
    study.set_user_attr("facts", dict(facts))


def run_trials(
    study: Study, space: Space, number: int, run: Callable[[Sequence[str]], float]
) -> None:
    """Run trials until the study has that many, those of other processes and before included.

    Args:
        study: From ``open_study``.
        space: As there.
        number: Of trials, each setting counted once; of a grid no more than it has.
        run: Trains settings in their directory, or reads the outcome there; returns the metric.
    """

    def finish(number: int, settings: Sequence[str]) -> None:
        try:
            study.tell(number, run(settings), skip_if_finished=True)
        except FloatingPointError:
            pruned = _optuna().trial.TrialState.PRUNED
            study.tell(number, state=pruned, skip_if_finished=True)
        except HeldError:
            pass  # the process that holds the directory tells the value

    def take_over() -> None:
        for begun in trials_in(study, "RUNNING"):
            if begun.params.keys() == names:
                finish(begun.number, as_settings(begun.params))

    names = {*space.choices, *space.ranges}
    number = number if space.ranges else min(number, len(space.grid))
    take_over()
    while len(_tried(study, names)) < number:
        trial = study.ask()
        finish(trial.number, space.suggest(trial))
    take_over()  # of processes that were killed meanwhile; others still hold theirs


def trials_in(study: Study, *states: str) -> list[FrozenTrial]:
    """Return the trials in any of some states: COMPLETE has a value, RUNNING is under way."""
    kinds = _optuna().trial.TrialState
    return study.get_trials(deepcopy=False, states=[kinds[state] for state in states])


def _tried(study: Study, names: set[str]) -> set[str]:
    """Return the settings that are done or under way, without those that are incomplete."""
    trials = trials_in(study, "COMPLETE", "PRUNED", "RUNNING")
    return {str(trial.params) for trial in trials if trial.params.keys() == names}


def _optuna() -> Any:
    with needing("a sweep needs Optuna", "train"):
        import optuna
    return optuna
