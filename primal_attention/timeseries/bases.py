"""The estimators on their base classes: those of aeon, else ones like them on scikit-learn's."""

import inspect
from abc import ABC, abstractmethod
from types import new_class
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from primal_attention.tasks import Series
from primal_attention.timeseries.estimators import Classifier, Regressor
from primal_attention.timeseries.parameters import Parameters

Bases = dict[str, tuple[type, ...]]


def assemble(name: str, module: str) -> type:
    """Assemble the estimator of that name, as a class of that module."""
    kind = name.removeprefix("PrimalFormer")
    part = {"Classifier": Classifier, "Regressor": Regressor}[kind]
    texts = (inspect.cleandoc(each.__doc__ or "") for each in (part, Parameters))
    body = {"__module__": module, "__qualname__": name, "__doc__": "\n\n".join(texts)}
    return new_class(name, (part, *bases()[kind]), exec_body=lambda space: space.update(body))


def bases() -> Bases:
    """Return the base classes of each kind of estimator, from what is installed."""
    try:
        return _aeon_bases()
    except ModuleNotFoundError as error:
        _raise_unless_absent("aeon", error)
    try:
        return _plain_bases()
    except ModuleNotFoundError as error:
        _raise_unless_absent("sklearn", error)
        message = (
            "the estimators need aeon, or at least scikit-learn: "
            "pip install 'primal-attention[timeseries]'"
        )
        raise ModuleNotFoundError(message, name=error.name) from error


def _raise_unless_absent(package: str, error: ModuleNotFoundError) -> None:
    """Raise unless the package is absent: a broken one is not taken for an absent one."""
    if (error.name or "").partition(".")[0] != package:
        raise error


def _aeon_bases() -> Bases:
    from aeon.classification import BaseClassifier
    from aeon.regression import BaseRegressor

    return {"Classifier": (BaseClassifier,), "Regressor": (BaseRegressor,)}


def _plain_bases() -> Bases:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin

    return {
        "Classifier": (PlainClassifier, ClassifierMixin, BaseEstimator),
        "Regressor": (PlainEstimator, RegressorMixin, BaseEstimator),
    }


class PlainEstimator(ABC):
    """Base class on scikit-learn: fit and predict as aeon's do, for series in numpy arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.is_fitted = False

    def fit(self, X: Any, y: Any) -> Self:
        """Learn from series X [n, channels, length] (or [n, length], or a list) and their y."""
        series, y = _series(X), np.asarray(y)
        if y.shape != (len(series),):
            raise ValueError(f"y must have one value a case, {len(series)}, got shape {y.shape}")
        self._fit(series, y)
        self.is_fitted = True
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Predict each case of X."""
        self._check_is_fitted()
        return self._predict(_series(X))

    def __sklearn_is_fitted__(self) -> bool:
        return self.is_fitted

    def _check_is_fitted(self) -> None:
        from sklearn.utils.validation import check_is_fitted

        message = "This instance of %(name)s has not been fitted yet; please call fit first."
        check_is_fitted(self, msg=message)

    @abstractmethod
    def _fit(self, X: Series, y: NDArray[Any]) -> Any: ...

    @abstractmethod
    def _predict(self, X: Series) -> NDArray[Any]: ...


class PlainClassifier(PlainEstimator):
    """Base class of classifiers on scikit-learn."""

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Predict the probability of each class for each case of X, [n, classes]."""
        self._check_is_fitted()
        return self._predict_proba(_series(X))

    @abstractmethod
    def _predict_proba(self, X: Series) -> NDArray[np.float64]: ...


def _series(X: Any) -> Series:
    """X as a list of cases [channels, length]."""
    cases = [np.asarray(case) for case in (X if isinstance(X, list | tuple) else np.asarray(X))]
    if not cases:
        raise ValueError("X has no case")
    return [case[None] if case.ndim == 1 else case for case in cases]
