"""What the estimators do: learn, answer, save and load. Base classes check and convert X and y."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.atomic_files import fitting
from primal_attention.models import SequenceClassifier
from primal_attention.tasks import CLASSIFICATION, REGRESSION, Goal, Series, SeriesEncoding
from primal_attention.timeseries.network import (
    build_network,
    hold_out,
    outputs_of,
    sizes_of,
    task_of,
    threads,
)
from primal_attention.timeseries.parameters import (
    Parameters,
    device_type,
    num_threads,
    plain_values,
    recipe_of,
)
from primal_attention.training import Recipe, launch, progress_bar, train
from primal_attention.training.checkpoint import read_checkpoint, write_checkpoint


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
    encoding_: SeriesEncoding
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
        """The estimator that ``save`` wrote."""
        tensors, facts = read_checkpoint(Path(path))
        found = facts.get("estimator", "the checkpoint of a training run")
        if found != cls.__name__:
            raise ValueError(f"{path} is no {cls.__name__}: it holds {found}")
        with fitting(Path(path), f"a {cls.__name__}"):
            estimator = cls(**facts["parameters"])
            estimator.recipe_ = Recipe.from_json(facts["recipe"])
            estimator.encoding_ = SeriesEncoding.from_dict(facts["encoding"])
            sizes = sizes_of(estimator.encoding_, facts["num_outputs"])
            estimator.network_ = build_network(estimator.recipe_, sizes, tensors)
            estimator.history_ = facts["history"]
            estimator._restore(facts)
        estimator.is_fitted = True
        return estimator

    def _learn(
        self, goal: Goal, num_outputs: int, X: Series, target: NDArray[Any], strata: NDArray[Any]
    ) -> None:
        """Train a network; the best epoch is chosen on cases held out of each stratum alike."""
        self._n_jobs = num_threads(self.n_jobs)
        seed = self._seed()
        split = hold_out(strata, self.valid_fraction, seed)
        recipe = recipe_of(self, seed, selects=len(split.held_out) > 0)
        task = task_of(goal, num_outputs, X, target, split)
        fabric = launch(recipe.run.precision, accelerator=device_type(self.device), devices=1)
        with threads(self._n_jobs):
            outcome = train(recipe, task, fabric, watcher=progress_bar() if self.verbose else None)
        assert isinstance(task.encoding, SeriesEncoding)
        self.recipe_, self.encoding_, self.history_ = recipe, task.encoding, outcome.rounds
        self.network_ = build_network(recipe, task.sizes, outcome.weights)

    def _outputs(self, X: Series) -> Tensor:
        """What the network makes of each case, [B, K]."""
        inputs = self.encoding_.encode(list(X))
        with threads(num_threads(self.n_jobs)):
            return outputs_of(self.network_, inputs, device_type(self.device))

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
        """What a file says beside the network."""

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

    def _fit(self, X: Series, y: NDArray[Any]) -> Self:
        classes, target = _classes(y)
        self._learn(CLASSIFICATION, len(classes), X, target, strata=target)
        self._restore_classes(classes)
        return self

    def _predict_proba(self, X: Series) -> NDArray[np.float64]:
        return self._outputs(X).softmax(-1).numpy()

    def _predict(self, X: Series) -> NDArray[Any]:
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
    """The labels there are, sorted, and the index of each case's."""
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

    def _fit(self, X: Series, y: NDArray[Any]) -> Self:
        y = np.asarray(y, dtype=np.float64)
        if not np.isfinite(y).all():
            raise ValueError("y must be finite; it has NaN or infinite values")
        mean, std = float(y.mean()), float(y.std()) or 1.0
        target = ((y - mean) / std).astype(np.float32)
        self._learn(REGRESSION, 1, X, target, strata=np.zeros(len(y), dtype=np.int64))
        self.target_mean_, self.target_std_ = mean, std
        return self

    def _predict(self, X: Series) -> NDArray[np.float64]:
        return self._outputs(X)[:, 0].numpy() * self.target_std_ + self.target_mean_

    def _facts(self) -> dict[str, Any]:
        return {"target_mean": self.target_mean_, "target_std": self.target_std_}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        self.target_mean_, self.target_std_ = facts["target_mean"], facts["target_std"]
