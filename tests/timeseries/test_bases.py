"""The estimators as others see them: aeon, scikit-learn, and Python without either."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

from primal_attention import timeseries
from primal_attention.timeseries import bases
from primal_attention.timeseries.bases import assemble


@pytest.fixture
def without(monkeypatch):
    def remove(*packages):
        for package in packages:
            for name in [each for each in sys.modules if each.split(".")[0] == package]:
                monkeypatch.delitem(sys.modules, name)
            monkeypatch.setitem(sys.modules, package, None)

    return remove


@pytest.mark.parametrize("name", timeseries.ESTIMATORS)
def test_the_checks_of_aeon(name):
    from aeon.testing.estimator_checking import check_estimator
    from aeon.testing.estimator_checking._yield_multithreading_checks import (
        check_estimator_multithreading,
    )

    estimator = getattr(timeseries, name)
    results = check_estimator(estimator)
    assert len(results) > 20
    assert {check: result for check, result in results.items() if result != "PASSED"} == {}
    kind = "Classification" if name == "PrimalFormerClassifier" else "Regression"
    check_estimator_multithreading(  # aeon leaves it out by default
        estimator._create_test_instance(), f"UnequalLengthMultivariate-{kind}-np-list"
    )


def test_they_are_classes_of_aeon():
    from aeon.classification import BaseClassifier
    from aeon.regression import BaseRegressor

    assert issubclass(timeseries.PrimalFormerClassifier, BaseClassifier)
    assert issubclass(timeseries.PrimalFormerRegressor, BaseRegressor)
    for name in timeseries.ESTIMATORS:
        estimator = getattr(timeseries, name)
        assert estimator is getattr(timeseries, name)
        assert (estimator.__module__, estimator.__qualname__) == (timeseries.__name__, name)
        assert "num_directions: " in estimator.__doc__
        for capability in ("multivariate", "unequal_length", "missing_values"):
            assert estimator.get_class_tag(f"capability:{capability}")


def test_every_parameter_is_described():
    for name in timeseries.PrimalFormerClassifier().get_params():
        assert f"    {name}: " in timeseries.PrimalFormerClassifier.__doc__


def test_another_name():
    with pytest.raises(AttributeError, match="no attribute 'PrimalFormer'"):
        timeseries.PrimalFormer  # noqa: B018


def test_tools_of_scikit_learn(noise, tiny):
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV, cross_val_score

    X, y = noise
    classifier = timeseries.PrimalFormerClassifier(**tiny)
    assert clone(classifier.fit(X, y)).get_params() == classifier.get_params()
    assert cross_val_score(classifier, X, y, cv=3).shape == (3,)
    search = GridSearchCV(classifier, {"dim": [2, 6]}, cv=2).fit(X, y)
    assert search.best_params_["dim"] in (2, 6)
    assert search.predict(X).shape == (29,)


def test_pipelines(noise, tiny):
    from aeon.pipeline import make_pipeline
    from aeon.transformations.collection import Normalizer
    from sklearn.pipeline import Pipeline

    X, y = noise
    ours = make_pipeline(Normalizer(), timeseries.PrimalFormerClassifier(**tiny)).fit(X, y)
    theirs = Pipeline([("a", Normalizer()), ("b", timeseries.PrimalFormerClassifier(**tiny))]).fit(
        X, y
    )
    assert ours.predict(X).shape == theirs.predict(X).shape == (29,)


def test_they_say_the_same_without_aeon(noise, tiny, without):
    X, y = noise
    expected = timeseries.PrimalFormerClassifier(**tiny).fit(X, y).predict_proba(X)
    expected_numbers = timeseries.PrimalFormerRegressor(**tiny).fit(X, X[:, 0, 0]).predict(X)
    without("aeon")
    classifier = assemble("PrimalFormerClassifier", "here")(**tiny)
    regressor = assemble("PrimalFormerRegressor", "here")(**tiny)
    assert [each.__module__.split(".")[0] for each in type(classifier).__mro__].count("aeon") == 0
    for series in (X, list(X)):
        assert np.array_equal(classifier.fit(series, y).predict_proba(series), expected)
    assert np.array_equal(regressor.fit(X, X[:, 0, 0]).predict(X), expected_numbers)
    assert classifier.score(X, y) == np.mean(classifier.predict(X) == y)
    assert regressor.score(X, X[:, 0, 0]) < 1


def test_errors_without_aeon(noise, tiny, without, tmp_path):
    from sklearn.base import clone
    from sklearn.exceptions import NotFittedError
    from sklearn.model_selection import cross_val_score

    without("aeon")
    X, y = noise
    classifier = assemble("PrimalFormerClassifier", "here")(**tiny)
    with pytest.raises(NotFittedError, match="PrimalFormerClassifier has not been fitted"):
        classifier.predict(X)
    with pytest.raises(ValueError, match="at least 2 unique labels, but found 1"):
        classifier.fit(X, np.zeros(29))
    with pytest.raises(ValueError, match=r"one value a case, 29, got shape \(3,\)"):
        classifier.fit(X, y[:3])
    with pytest.raises(ValueError, match="X has no case"):
        classifier.fit([], y[:0])
    with pytest.raises(ValueError, match="Unknown label type: continuous"):
        classifier.fit(X, X[:, 0, 0])
    with pytest.raises(ValueError, match=r"case 0 must have shape \[3 channels, length\]"):
        classifier.fit(X, y).predict(X[:, :2])
    with pytest.raises(ValueError, match="y must be finite"):
        assemble("PrimalFormerRegressor", "here")(**tiny).fit(X, np.full(29, np.nan))
    classifier.save(tmp_path / "file")
    again = type(classifier).load(tmp_path / "file")
    assert np.array_equal(again.predict_proba(X), classifier.predict_proba(X))
    univariate = clone(classifier).fit(list(X[:, 0]), y)
    assert np.array_equal(univariate.predict(X[:, 0]), univariate.predict(X[:, :1]))
    assert cross_val_score(classifier, X, y, cv=2).shape == (2,)


def test_without_both(without):
    without("aeon", "sklearn")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'primal-attention\[timeseries\]'"):
        assemble("PrimalFormerClassifier", "here")


def test_a_broken_aeon_is_not_taken_for_none(monkeypatch):
    def broken():
        raise ModuleNotFoundError("No module named 'numba'", name="numba")

    monkeypatch.setattr(bases, "_aeon_bases", broken)
    with pytest.raises(ModuleNotFoundError, match="numba"):
        assemble("PrimalFormerClassifier", "here")


def test_another_process(noise, tiny, tmp_path):
    """An import loads no heavy library; a pickle finds its class."""
    X, y = noise
    classifier = timeseries.PrimalFormerClassifier(**tiny).fit(X, y)
    (tmp_path / "pickle").write_bytes(pickle.dumps((classifier, X, classifier.predict_proba(X))))
    code = """
import pickle, sys
import torch
import primal_attention.timeseries
heavy = {"aeon", "numba", "sklearn", "pandas", "lightning_fabric", "pytorch_lightning"}
found = heavy & {name.split(".")[0] for name in sys.modules}
assert not found, found
torch.set_num_threads(1)
classifier, X, expected = pickle.load(open(sys.argv[1], "rb"))
assert (classifier.predict_proba(X) == expected).all()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "pickle")]
    subprocess.run(command, check=True, timeout=120)


def test_the_adapter_of_sktime(noise, tiny):
    pytest.importorskip("sktime")
    from primal_attention.timeseries.sktime_adapter import SktimeClassifier

    X, y = noise
    ours = timeseries.PrimalFormerClassifier(**{**tiny, "num_features": 600})
    theirs = SktimeClassifier(ours).fit(X, y)
    assert np.array_equal(theirs.predict_proba(X), ours.fit(X, y).predict_proba(X))
    assert np.array_equal(theirs.predict(X), ours.predict(X))
    assert pickle.loads(pickle.dumps(theirs)).predict(X).shape == (29,)
