"""Estimators that learn, answer, save and load; base classes check and convert X and y."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from primal_attention import tasks
from primal_attention.atomic_files import fitting
from primal_attention.models import SequenceClassifier
from primal_attention.timeseries.augmentation import CLASSES, NUMBERS, AugmentedSeries
from primal_attention.timeseries.blend import Blend, blend_of_classes, blend_of_numbers
from primal_attention.timeseries.machine import ConvolutionMachine
from primal_attention.timeseries.networks import (
    MOST_TO_REFIT,
    Ensemble,
    TrainedNetwork,
    outputs_of,
    tell,
    together,
    train_network,
)
from primal_attention.timeseries.parameters import (
    Parameters,
    device_type,
    num_threads,
    plain_values,
    preset_of,
)
from primal_attention.training import Recipe, trained_model
from primal_attention.training.checkpoint import read_checkpoint, write_checkpoint

_MACHINE = "machine."  # before the names of its tensors in a file


class Estimator(Parameters, ABC):
    """Networks and a closed-form machine on time series, between arrays and arrays."""

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
    recipe_: Recipe | None  # of the networks
    encoding_: tasks.SeriesEncoding
    machine_: ConvolutionMachine | None
    network_: SequenceClassifier | Ensemble | None
    blend_: Blend  # by what the outputs of the machine and of the network are multiplied
    history_: list[dict[str, float]]  # of each round of training: losses and the metric
    _num_outputs: int
    _sample_weight: Any = None  # these have defaults here, so that aeon's ``reset`` leaves them
    _before: Sequence[SequenceClassifier] = ()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Learn from series X [n, channels, length] (or [n, length], or a list) and their y.

        ``sample_weight`` has a positive number a case, by which it counts in the loss.
        """
        self._sample_weight = sample_weight
        self._before = _members(getattr(self, "network_", None)) if self.warm_start else ()
        try:
            fitted: Self = super().fit(X, y)  # type: ignore[misc]
        finally:
            del self._sample_weight, self._before
        return fitted

    def save(self, path: str | Path) -> None:
        """Write the fitted estimator to one safetensors file, which holds no code."""
        self._check_is_fitted()
        parameters = plain_values(self)
        if isinstance(self.random_state, np.random.RandomState):
            parameters["random_state"] = self._fitted_seed
        facts = {
            "estimator": type(self).__name__,
            "parameters": parameters,
            "recipe": self.recipe_.to_json() if self.recipe_ else None,
            "encoding": self.encoding_.to_dict(),
            "num_outputs": self._num_outputs,
            "num_networks": len(_members(self.network_)),
            "blend": self.blend_,
            "history": self.history_,
            **self._facts(),
        }
        tensors = self.network_.state_dict() if self.network_ else {}
        if self.machine_:
            numbers = self.machine_.tensors().items()
            tensors = {**tensors, **{f"{_MACHINE}{name}": each for name, each in numbers}}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, tensors, facts)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load the estimator that ``save`` wrote."""
        tensors, facts = read_checkpoint(Path(path))
        found = facts.get("estimator", "the checkpoint of a training run")
        if found != cls.__name__:
            raise ValueError(f"{path} is no {cls.__name__}: it holds {found}")
        with fitting(Path(path), f"a {cls.__name__}"):
            estimator = cls(**facts["parameters"])
            estimator.encoding_ = tasks.SeriesEncoding.from_dict(facts["encoding"])
            estimator._num_outputs = facts["num_outputs"]
            estimator.recipe_ = Recipe.from_json(facts["recipe"]) if facts["recipe"] else None
            estimator.network_ = estimator._restored(tensors, facts.get("num_networks", 1))
            machine = _beginning(_MACHINE, tensors)
            estimator.machine_ = ConvolutionMachine.of_tensors(machine) if machine else None
            first, second = facts.get("blend", (0.0, 1.0))  # files of before have a network alone
            estimator.blend_ = first, second
            estimator.history_ = facts["history"]
            estimator._restore(facts)
        estimator.is_fitted = True
        return estimator

    def _restored(
        self, tensors: Mapping[str, Tensor], number: int
    ) -> SequenceClassifier | Ensemble | None:
        """Make trained networks again."""
        prefixes = [""] if number == 1 else [f"networks.{index}." for index in range(number)]
        weights = {name: each for name, each in tensors.items() if not name.startswith(_MACHINE)}
        recipe, sizes = self.recipe_, self._sizes()
        if recipe is None:
            return None
        each = [_beginning(prefix, weights) for prefix in prefixes]
        return together([trained_model(recipe, sizes, member) for member in each])

    def _learn(
        self, goal: tasks.Goal, X: tasks.Series, target: Tensor, signs: Tensor, strata: Tensor
    ) -> None:
        """Fit the machine, train the networks and choose how much each counts.

        Args:
            goal: Of the networks.
            X: The series.
            target: Of the networks, see ``AugmentedSeries``.
            signs: Targets of the machine, [n, K].
            strata: Cases are held out of each alike.
        """
        self._n_jobs = num_threads(self.n_jobs)
        num_features, num_networks = preset_of(self)
        device, seed = device_type(self.device), self._seed()
        self._fitted_seed, self._num_outputs = seed, signs.shape[1]
        self.encoding_ = tasks.SeriesEncoding.fit(X)
        inputs = self.encoding_.encode(X)
        weight = self._weights(strata)
        self.machine_, left_out = None, None
        trained: list[TrainedNetwork] = []
        with _threads(self._n_jobs):
            if num_features:
                tell(self, f"machine on {num_features} features of random convolutions")
                on_device = (each.to(device) for each in (signs, weight))
                moved = {name: each.to(device) for name, each in inputs.items()}
                machine, left_out = ConvolutionMachine.fit(
                    moved, *on_device, num_features=num_features, seed=seed
                )
                self.machine_, left_out = machine.to("cpu"), left_out.cpu()
            cases = AugmentedSeries(
                inputs,
                self._weighted(target, weight),
                noise=self.noise,
                time_mask=self.time_mask,
                channel_dropout=self.channel_dropout,
                mixup=self.mixup,
            )
            refit = self.refit
            if refit is None:
                refit = num_networks == 1 and len(X) < MOST_TO_REFIT
            for index in range(num_networks):
                tell(self, f"network {index + 1} of {num_networks}")
                before = self._before[index : index + 1]
                trained.append(
                    train_network(
                        self,
                        goal,
                        cases,
                        strata.numpy(),
                        self._sizes(),
                        seed=seed + index,
                        refit=refit,
                        weights=before[0].state_dict() if before else None,
                    )
                )
        self.network_ = together([each.network for each in trained])
        self.recipe_ = trained[0].recipe if trained else None
        self.history_ = [entry for each in trained for entry in each.history]
        self.blend_ = self._blend_of(left_out, trained, signs, weight)

    def _blend_of(
        self, left_out: Tensor | None, trained: list[TrainedNetwork], signs: Tensor, weight: Tensor
    ) -> Blend:
        """Choose how much machine and network count, on what was held out of both."""
        if not trained:
            return self._blend(left_out, None, signs, weight)
        held_out = torch.cat([each.held_out for each in trained])
        if not len(held_out):  # of the machine something always is
            if left_out is None:
                return 0.0, 1.0
            if self._num_outputs == 1:
                return 0.5, 0.5
            return self._blend(left_out, None, signs, weight)[0], 1.0
        scores = None if left_out is None else left_out[held_out]
        outputs = torch.cat([each.outputs for each in trained])
        return self._blend(scores, outputs, signs[held_out], weight[held_out])

    def _outputs(self, X: tasks.Series) -> Tensor:
        """Compute the blended outputs of each case, [B, K]."""
        inputs, device = self.encoding_.encode(list(X)), device_type(self.device)
        blended = torch.zeros(len(X), self._num_outputs, dtype=torch.float64)
        with _threads(num_threads(self.n_jobs)):
            for model, factor in zip((self.machine_, self.network_), self.blend_, strict=True):
                if model is not None and factor:
                    moved: Any = model if device == "cpu" else deepcopy(model).to(device)
                    blended += factor * outputs_of(moved, inputs, self)
        return blended

    def _sizes(self) -> tasks.Sizes:
        """Return the sizes of the cases that a network is built for."""
        encoding = self.encoding_
        return tasks.Sizes(
            encoding.num_tokens, self._num_outputs, num_channels=encoding.num_channels
        )

    def _weights(self, strata: Tensor) -> Tensor:
        """Return the weight of each case, one on average."""
        weight = torch.ones(len(strata), dtype=torch.float64)
        if self._sample_weight is not None:
            weight = torch.as_tensor(np.asarray(self._sample_weight, dtype=np.float64))
            if weight.shape != strata.shape or not (weight > 0).all():
                raise ValueError(
                    f"sample_weight must have one positive number a case, {len(strata)}, "
                    f"got shape {tuple(weight.shape)}"
                )
        weight = weight * self._stratum_weights(strata)
        return weight / weight.mean()

    def _seed(self) -> int:
        from sklearn.utils import check_random_state

        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> dict[str, Any]:
        """Small and fast, for aeon's checks."""
        return {
            "num_features": 200,
            "num_layers": 1,
            "dim": 8,
            "num_heads": 2,
            "ffn_dim": 8,
            "num_directions": 3,
            "samples_per_direction": 2,
            "epochs": 2,
        }

    @abstractmethod
    def _stratum_weights(self, strata: Tensor) -> Tensor:
        """Return the weight of each case's stratum."""

    @abstractmethod
    def _weighted(self, target: Tensor, weight: Tensor) -> Tensor:
        """Return targets with weights, as the goal reads them."""

    @abstractmethod
    def _blend(
        self, scores: Tensor | None, outputs: Tensor | None, signs: Tensor, weight: Tensor
    ) -> Blend:
        """Choose how much scores of the machine and outputs of the network count."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return what a file says beside the network."""

    @abstractmethod
    def _restore(self, facts: Mapping[str, Any]) -> None:
        """Set what ``_facts`` said."""


class Classifier(Estimator):
    """A classifier of time series: a ridge machine on random convolutions beside a network.

    The network is a small Transformer, by default with Primal-Attention. X is [n, channels,
    length], [n, length], or a list of cases [channels, length] of different lengths; NaN is a
    missing value. Series longer than those trained on are clipped.
    """

    classes_: NDArray[Any]
    n_classes_: int

    def _fit(self, X: tasks.Series, y: NDArray[Any]) -> Self:
        classes, target = _classes(y)
        self._restore_classes(classes)
        strata = torch.from_numpy(target)
        hot = F.one_hot(strata, len(classes)).float()
        self._learn(CLASSES, X, hot, 2 * hot - 1, strata)
        return self

    def _stratum_weights(self, strata: Tensor) -> Tensor:
        if self.class_weight is None:
            return torch.ones(len(strata), dtype=torch.float64)
        if self.class_weight == "balanced":
            return 1 / strata.bincount()[strata].double()
        weights = {str(label): weight for label, weight in self.class_weight.items()}
        missing = [label for label in self.classes_.tolist() if str(label) not in weights]
        if missing or min(weights.values()) <= 0:
            raise ValueError(
                f"class_weight must have a positive number for each class, got "
                f"{dict(self.class_weight)}; without one: {missing}"
            )
        each = [weights[str(label)] for label in self.classes_.tolist()]
        return torch.tensor(each, dtype=torch.float64)[strata]

    def _weighted(self, target: Tensor, weight: Tensor) -> Tensor:
        smooth = self.label_smoothing
        return ((1 - smooth) * target + smooth / target.shape[1]) * weight[:, None].float()

    def _blend(
        self, scores: Tensor | None, outputs: Tensor | None, signs: Tensor, weight: Tensor
    ) -> Blend:
        return blend_of_classes(scores, outputs, signs.argmax(1), weight)

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
    """A regressor of time series: a ridge machine on random convolutions beside a network.

    The network is a small Transformer, by default with Primal-Attention. X is [n, channels,
    length], [n, length], or a list of cases [channels, length] of different lengths; NaN is a
    missing value. Series longer than those trained on are clipped. It has no ``class_weight``.
    """

    target_mean_: float
    target_std_: float

    def _fit(self, X: tasks.Series, y: NDArray[Any]) -> Self:
        y = np.asarray(y, dtype=np.float64)
        if self.uncertainty:
            raise ValueError(
                "uncertainty=True needs classes, whose probabilities it averages; "
                "give PrimalFormerRegressor uncertainty=False"
            )
        if not np.isfinite(y).all():
            raise ValueError("y must be finite; it has NaN or infinite values")
        self.target_mean_, self.target_std_ = float(y.mean()), float(y.std()) or 1.0
        target = torch.from_numpy((y - self.target_mean_) / self.target_std_).float()[:, None]
        self._learn(NUMBERS, X, target, target, torch.zeros(len(y), dtype=torch.int64))
        return self

    def _stratum_weights(self, strata: Tensor) -> Tensor:
        return torch.ones(len(strata), dtype=torch.float64)

    def _weighted(self, target: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([target, weight[:, None].float()], 1)

    def _blend(
        self, scores: Tensor | None, outputs: Tensor | None, signs: Tensor, weight: Tensor
    ) -> Blend:
        return blend_of_numbers(scores, outputs, signs[:, 0], weight)

    def _predict(self, X: tasks.Series) -> NDArray[np.float64]:
        return self._outputs(X)[:, 0].numpy() * self.target_std_ + self.target_mean_

    def _facts(self) -> dict[str, Any]:
        return {"target_mean": self.target_mean_, "target_std": self.target_std_}

    def _restore(self, facts: Mapping[str, Any]) -> None:
        self.target_mean_, self.target_std_ = facts["target_mean"], facts["target_std"]


def _members(network: SequenceClassifier | Ensemble | None) -> list[Any]:
    """Return the networks of which one is made."""
    if isinstance(network, Ensemble):
        return list(network.networks)
    return [] if network is None else [network]


def _beginning(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin so, without it."""
    return {
        name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)
    }


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Set the number of PyTorch threads, and restore it at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
