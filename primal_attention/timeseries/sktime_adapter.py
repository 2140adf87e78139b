"""The classifier as one of sktime: ``SktimeClassifier``, built when it is first asked for."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Build the class once: pickle looks it up here by its name."""
    if name != "SktimeClassifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, _built())


def _built() -> type:
    from sktime.classification.base import BaseClassifier

    class SktimeClassifier(BaseClassifier):  # type: ignore[misc]
        """A ``PrimalFormerClassifier`` behind the interface of sktime.

        Args:
            classifier: What is cloned, and fitted.
        """

        _tags = {  # noqa: RUF012 - sktime reads a plain class attribute
            "X_inner_mtype": "numpy3D",
            "capability:multivariate": True,
            "capability:predict_proba": True,
            "capability:missing_values": True,
        }

        def __init__(self, classifier: Any):
            self.classifier = classifier
            super().__init__()

        def _fit(self, X: Any, y: Any) -> Any:
            from sklearn.base import clone

            self.classifier_ = clone(self.classifier).fit(X, y)
            return self

        def _predict(self, X: Any) -> Any:
            return self.classifier_.predict(X)

        def _predict_proba(self, X: Any) -> Any:
            return self.classifier_.predict_proba(X)

    SktimeClassifier.__module__ = __name__
    SktimeClassifier.__qualname__ = "SktimeClassifier"
    return SktimeClassifier
