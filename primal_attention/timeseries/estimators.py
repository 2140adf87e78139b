"""Estimators that learn, answer, save and load; base classes check and convert X and y."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention import tasks
from primal_attention.atomic_files import fitting
from primal_attention.models import SequenceClassifier
from primal_attention.tasks.splits import Split
from primal_attention.timeseries.parameters import (
    Parameters,
    device_type,
    num_threads,
    plain_values,
    recipe_of,
)
from primal_attention.training import Recipe, launch, progress_bar, train, trained_model
from primal_attention.training.checkpoint import read_checkpoint, write_checkpoint

_FEWEST_CASES = 10  # below, a part of them says nothing about the rest
_BATCH_SIZE = 128


class Estimator(Parameters, ABC):
    """A network that is trained on time series, between arrays and arrays."""

    _tags: ClassVar[dict[str, Any]] = {
        "X_inner_type": ["np-list", "numpy3D"],
        "algorithm_type": "deeplearning",
        "capability:multivariate": True,
        "capability:unequal_length": True,
        "capability:missing_values": True,
        "capability:multithreading": True,
    }

    is_fitted: bool  # this and the next come from the base class
    _check_is_fitted: Callable[[], None]
    recipe_: Recipe
    encoding_: tasks.SeriesEncoding
    network_: SequenceClassifier
    history_: list[dict[str, float]]  # of each epoch: losses and the metric

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to one safetensors file, which holds no code."""
        self._check_is_fitted()
        parameters = plain_values(self)
        if isinstance(self.random_state, np.random.RandomState):
            parameters["random_state"] = self.recipe_.run.seed
        facts = {
            "estimator": type(self).__name__,
            "parameters": parameters,
            "recipe": self.recipe_.to_json(),
            "encoding": self.encoding_.to_dict(),
            "num_outputs": self.network_.head.out_features,
            "history": self.history_,
            **self._facts(),
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, self.network_.state_dict(), facts)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the estimator that ``save`` wrote."""
        tensors, facts = read_checkpoint(Path(path))
        found = facts.get("estimator", "the checkpoint of a training run")
        if found != cls.__name__:
            raise ValueError(f"{path} is no {cls.__name__}: it holds {found}")
        with fitting(Path(path), f"a {cls.__name__}"):
            estimator = cls(**facts["parameters"])
            estimator.recipe_ = Recipe.from_json(facts["recipe"])
            estimator.encoding_ = tasks.SeriesEncoding.from_dict(facts["encoding"])
            sizes = _sizes_of(estimator.encoding_, facts["num_outputs"])
            estimator.network_ = trained_model(estimator.recipe_, sizes, tensors)
            estimator.history_ = facts["history"]
            estimator._restore(facts)
        estimator.is_fitted = True
        return estimator

    def _learn(
        self,
        goal: tasks.Goal,
        num_outputs: int,
        X: tasks.Series,
        target: NDArray[Any],
        strata: NDArray[Any],
    ) -> None:
        """Train a network; the best epoch is chosen on cases held out of each stratum alike."""
        self._n_jobs = num_threads(self.n_jobs)
        seed = self._seed()
        split = _hold_out(strata, self.valid_fraction, seed)
        recipe = recipe_of(self, seed, selects=len(split.held_out) > 0)
        task = _task_of(goal, num_outputs, X, target, split)
        fabric = launch(recipe.run.precision, accelerator=device_type(self.device), devices=1)
        with _threads(self._n_jobs):
            outcome = train(recipe, task, fabric, watcher=progress_bar() if self.verbose else None)
        assert isinstance(task.encoding, tasks.SeriesEncoding)
        self.recipe_, self.encoding_, self.history_ = recipe, task.encoding, outcome.rounds
        self.network_ = trained_model(recipe, task.sizes, outcome.weights)

    def _outputs(self, X: tasks.Series) -> Tensor:
        """Compute the network's outputs of each case, [B, K]."""
        inputs = self.encoding_.encode(list(X))
        with _threads(num_threads(self.n_jobs)):
            return _outputs_of(self.network_, inputs, device_type(self.device))

    def _seed(self) -> int:
        from sklearn.utils import check_random_state

        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        """Small and fast, for aeon's checks."""
        return {
            "num_layers": 1,
            "dim": 8,
            "num_heads": 2,
            "ffn_dim": 8,
            "num_directions": 3,
            "samples_per_direction": 2,
            "epochs": 2,
        }

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return what a file says beside the network."""

    @abstractmethod
    def _restore(self, facts: Mapping[str, Any]) -> None:
        """Set what ``_facts`` said."""


class Classifier(Estimator):
    """A classifier of time series: a small Transformer, by default with Primal-Attention.

    X is [n, channels, length], [n, length], or a list of cases [channels, length] of different
    lengths; NaN is a missing value. Series longer than those trained on are clipped.
    """

    classes_: NDArray[Any]
    n_classes_: int

    def _fit(self, X: tasks.Series, y: NDArray[Any]) -> Self:
        classes, target = _classes(y)
        self._learn(tasks.CLASSIFICATION, len(classes), X, target, strata=target)
        self._restore_classes(classes)
        return self

    def _predict_proba(self, X: tasks.Series) -> NDArray[np.float64]:
        return self._outputs(X).softmax(-1).numpy()

    def _predict(self, X: tasks.Series) -> NDArray[Any]:
        labels: NDArray[Any] = self.classes_[self._outputs(X).argmax(-1).numpy()]
        return labels

    def _facts(self) -> dict[str, Any]:
        return {"classes": self.classes_.tolist(), "dtype": self.classes_.dtype.str}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        self._restore_classes(np.array(facts["classes"], dtype=facts["dtype"]))

    def _restore_classes(self, classes: NDArray[Any]) -> None:
        self.classes_, self.n_classes_ = classes, len(classes)
        self._class_dictionary = {label: index for index, label in enumerate(classes)}


def _classes(y: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the sorted labels and the index of each case's."""
    from sklearn.utils.multiclass import check_classification_targets

    check_classification_targets(y)
    classes, target = np.unique(y, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"y must contain at least 2 unique labels, but found {len(classes)}")
    return classes, target


class Regressor(Estimator):
    """A regressor of time series: a small Transformer, by default with Primal-Attention.

    X is [n, channels, length], [n, length], or a list of cases [channels, length] of different
    lengths; NaN is a missing value. Series longer than those trained on are clipped.
    """

    target_mean_: float
    target_std_: float

    def _fit(self, X: tasks.Series, y: NDArray[Any]) -> Self:
        y = np.asarray(y, dtype=np.float64)
        if not np.isfinite(y).all():
            raise ValueError("y must be finite; it has NaN or infinite values")
        mean, std = float(y.mean()), float(y.std()) or 1.0
        target = ((y - mean) / std).astype(np.float32)
        self._learn(tasks.REGRESSION, 1, X, target, strata=np.zeros(len(y), dtype=np.int64))
        self.target_mean_, self.target_std_ = mean, std
        return self

    def _predict(self, X: tasks.Series) -> NDArray[np.float64]:
        return self._outputs(X)[:, 0].numpy() * self.target_std_ + self.target_mean_

    def _facts(self) -> dict[str, Any]:
        return {"target_mean": self.target_mean_, "target_std": self.target_std_}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        self.target_mean_, self.target_std_ = facts["target_mean"], facts["target_std"]


def _hold_out(strata: NDArray[np.int64], fraction: float | None, seed: int) -> Split:
    """Cases to validate on, from each stratum alike; none where there are too few."""
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"valid_fraction must be in (0, 1) or None, got {fraction}")
    if fraction is None or _too_few(strata, fraction):
        return Split(kept=np.arange(len(strata)), held_out=np.arange(0))
    return tasks.stratified_split(strata, fraction, seed)


def _too_few(strata: NDArray[np.int64], fraction: float) -> bool:
    _, sizes = np.unique(strata, return_counts=True)
    cases = len(strata)
    return cases < _FEWEST_CASES or sizes.min() < 2 or fraction * cases < 1


def _task_of(
    goal: tasks.Goal, num_outputs: int, series: tasks.Series, target: NDArray[Any], split: Split
) -> tasks.Task:
    """Make the task of learning the kept cases; they validate too where none is held out."""
    encoding = tasks.SeriesEncoding.fit([series[i] for i in split.kept])

    def cases(part: NDArray[np.int64]) -> tasks.Cases:
        return tasks.Cases(
            encoding.encode([series[i] for i in part]), torch.from_numpy(target[part])
        )

    train = cases(split.kept)
    valid = cases(split.held_out) if len(split.held_out) else train
    sizes = _sizes_of(encoding, num_outputs)
    return tasks.Task("timeseries", goal, sizes, train, valid, test=valid, encoding=encoding)


def _sizes_of(encoding: tasks.SeriesEncoding, num_outputs: int) -> tasks.Sizes:
    """Return the sizes of the cases that a network is built for."""
    return tasks.Sizes(encoding.num_tokens, num_outputs, num_channels=encoding.num_channels)


@torch.no_grad()
def _outputs_of(network: SequenceClassifier, inputs: Mapping[str, Tensor], device: str) -> Tensor:
    """Compute the outputs of all cases, [B, K] in float64 on the CPU; the network stays there."""
    network = network if device == "cpu" else deepcopy(network).to(device)

    def answers(part: slice) -> Tensor:
        outputs: Tensor = network(**{name: each[part].to(device) for name, each in inputs.items()})
        return outputs.cpu().double()

    starts = range(0, len(inputs["token_mask"]), _BATCH_SIZE)
    return torch.cat([answers(slice(start, start + _BATCH_SIZE)) for start in starts])


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Set the number of PyTorch threads, and restore it at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
