"""Search for settings: trials of one study that any number of processes and machines share.

A trial is a run in a directory of its own, so one that was interrupted is taken up again where it
was. The objective is the metric of the cases that choose the round; the test cases have no say.
"""

from __future__ import annotations

import itertools
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_TRIES = 8  # to open a storage
_HEARTBEAT, _GRACE = 20, 90  # seconds; a trial silent for longer is given to another process


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


def open_study(
    name: str, storage: str, recipe: Recipe, space: Space, *, higher_is_better: bool
) -> Study:
    """Open the study of that name, or make it; it must be of this recipe."""
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler() if space.ranges else optuna.samplers.RandomSampler()
    study: Study = optuna.create_study(
        study_name=name,
        storage=_storage(storage),
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
    study: Study,
    space: Space,
    number: int,
    run: Callable[[Sequence[str], str], float],
) -> None:
    """Trials until the study has that many, those of other processes and earlier ones included.

    Args:
        study: From ``open_study``.
        space: As there.
        number: Of trials, each counted once; of a grid no more than it has.
        run: Trains settings in the directory of that name and returns the metric.
    """
    optuna = _optuna()

    def objective(trial: Trial) -> float:
        settings = space.suggest(trial)
        if _is_done_elsewhere(study, trial):
            raise optuna.TrialPruned
        try:
            return run(settings, directory_of(trial))
        except FloatingPointError as error:
            raise optuna.TrialPruned(str(error)) from error
        except BaseException:
            _enqueue_again(study, trial)
            raise

    number = number if space.ranges else min(number, len(space.grid))
    while len(_begun(study)) < number:
        study.optimize(objective, n_trials=1)


def directory_of(trial: Trial | FrozenTrial) -> str:
    """Return the name of a trial's directory, which a resumed trial keeps."""
    return str(trial.user_attrs.get("directory", f"trial{trial.number}"))


def trials_in(study: Study, *states: str) -> list[FrozenTrial]:
    """Return the trials in any of some states: COMPLETE has a value, RUNNING is under way."""
    kinds = _optuna().trial.TrialState
    return study.get_trials(deepcopy=False, states=[kinds[state] for state in states])


def _begun(study: Study) -> set[str]:
    """Return the settings that are done or under way; trials of lost processes begin again."""
    with _experimental() as optuna:
        optuna.storages.fail_stale_trials(study)
    return {str(trial.params) for trial in trials_in(study, "COMPLETE", "PRUNED", "RUNNING")}


def _is_done_elsewhere(study: Study, trial: Trial) -> bool:
    """Return whether an earlier trial with the same settings is done or under way."""
    return any(
        other.number < trial.number and other.params == trial.params
        for other in trials_in(study, "COMPLETE", "RUNNING")
    )


def _enqueue_again(study: Study, trial: Trial | FrozenTrial) -> None:
    """Give a trial that was interrupted to whoever comes next, with its directory."""
    study.enqueue_trial(trial.params, user_attrs={"directory": directory_of(trial)})


def _storage(url: str) -> Any:
    """Open the storage; several processes that make it at once may need more than one try.

    It enqueues trials again whose process has been gone for a while.
    """
    _optuna()
    from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError

    if url.startswith("sqlite:///"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    for left in reversed(range(_TRIES)):
        try:
            with _experimental() as optuna:
                return optuna.storages.RDBStorage(
                    url,
                    heartbeat_interval=_HEARTBEAT,
                    grace_period=_GRACE,
                    heartbeat_stale_trial_callback=_enqueue_again,
                )
        except (SQLAlchemyError, ImportError) as error:
            if left and isinstance(error, IntegrityError | OperationalError):
                time.sleep(random.uniform(0.1, 0.5))
                continue
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"no study can be kept in {url!r} ({reason}); a storage is for instance "
                "sqlite:///sweep.db or postgresql://user@host/name"
            ) from error
    raise AssertionError("the last try returns or raises")


@contextmanager
def _experimental() -> Iterator[Any]:
    """Use experimental functions of Optuna without its warnings."""
    optuna = _optuna()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield optuna


def _optuna() -> Any:
    with needing("a sweep needs Optuna", "train"):
        import optuna
    return optuna
