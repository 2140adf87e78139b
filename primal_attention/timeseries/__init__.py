"""Time series classification and regression for scikit-learn and aeon: fit, predict, save, load.

The estimators are built when they are first asked for, on aeon's base classes where aeon is
installed and on scikit-learn's where it is not. Importing this module imports neither.
"""

from typing import TYPE_CHECKING, Any

from primal_attention.timeseries.bases import PlainClassifier, PlainEstimator, assemble
from primal_attention.timeseries.estimators import Classifier, Regressor
from primal_attention.timeseries.selection import PresetSelection, select_preset

if TYPE_CHECKING:  # for type checkers and editors, on the bases that need no other package

    class PrimalFormerClassifier(Classifier, PlainClassifier):
        """See ``Classifier`` and ``Parameters``."""

    class PrimalFormerRegressor(Regressor, PlainEstimator):
        """See ``Regressor`` and ``Parameters``."""


ESTIMATORS = ("PrimalFormerClassifier", "PrimalFormerRegressor")
__all__ = ["PresetSelection", "PrimalFormerClassifier", "PrimalFormerRegressor", "select_preset"]


def __getattr__(name: str) -> Any:
    """Build an estimator once: pickle and joblib look it up here by its name."""
    if name not in ESTIMATORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, assemble(name, __name__))
