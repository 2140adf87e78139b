"""Time series classification and regression for scikit-learn and aeon: fit, predict, save, load.

The estimators are built when they are first asked for, on aeon's base classes where aeon is
installed and on scikit-learn's where it is not. Importing this module imports neither.
"""

from typing import Any

from primal_attention.timeseries.bases import assemble

__all__ = ["PrimalFormerClassifier", "PrimalFormerRegressor"]


def __getattr__(name: str) -> Any:
    """An estimator, built once: pickle and joblib look it up here by its name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, assemble(name, __name__))
