"""A fitted estimator comes back from its file, from pickle and from a copy, bit for bit."""

import copy
import pickle

import joblib
import numpy as np
import pytest
import torch

from primal_attention import timeseries


@pytest.fixture
def fitted(noise, tiny):
    return timeseries.PrimalFormerClassifier(**tiny).fit(*noise)


def through_file(estimator, folder):
    estimator.save(folder / "new" / "estimator.safetensors")
    assert [each.name for each in (folder / "new").iterdir()] == ["estimator.safetensors"]
    return type(estimator).load(folder / "new" / "estimator.safetensors")


def through_pickle(estimator, folder):
    return pickle.loads(pickle.dumps(estimator))


def through_joblib(estimator, folder):
    joblib.dump(estimator, folder / "estimator.joblib")
    return joblib.load(folder / "estimator.joblib")


def through_copy(estimator, folder):
    return copy.deepcopy(estimator)


WAYS = [through_file, through_pickle, through_joblib, through_copy]


@pytest.mark.parametrize("way", WAYS)
def test_a_classifier_comes_back(fitted, noise, way, tmp_path):
    again = way(fitted, tmp_path)
    assert type(again) is timeseries.PrimalFormerClassifier
    assert again.get_params() == fitted.get_params()
    assert again.history_ == fitted.history_
    assert np.array_equal(again.predict_proba(noise[0]), fitted.predict_proba(noise[0]))
    before = fitted.predict_proba(noise[0])
    with torch.no_grad():
        again.network_.head.weight.zero_()  # it shares nothing with the first
    assert np.array_equal(fitted.predict_proba(noise[0]), before)


@pytest.mark.parametrize("way", WAYS)
def test_a_regressor_comes_back(noise, tiny, way, tmp_path):
    X, _ = noise
    fitted = timeseries.PrimalFormerRegressor(**tiny).fit(X, 100 + 7 * X[:, 0].mean(1))
    assert np.array_equal(way(fitted, tmp_path).predict(X), fitted.predict(X))


def test_a_loaded_one_can_be_fitted_again(fitted, noise, tmp_path):
    again = through_file(fitted, tmp_path)
    before = again.predict_proba(noise[0])
    assert np.array_equal(again.fit(*noise).predict_proba(noise[0]), before)
    with pytest.raises(ValueError, match="channels"):
        through_file(fitted, tmp_path).predict(noise[0][:, :2])


def test_loading_leaves_the_random_numbers_alone(fitted, tmp_path):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    through_file(fitted, tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_of_numpy_are_saved_as_numbers(noise, tiny, tmp_path):
    changed = {"epochs": np.int64(1), "dropout": np.float32(0.5), "attention": {"bias": np.True_}}
    fitted = timeseries.PrimalFormerClassifier(**{**tiny, **changed}).fit(*noise)
    again = through_file(fitted, tmp_path).get_params()
    assert (again["epochs"], again["dropout"], again["attention"]) == (1, 0.5, {"bias": True})


def test_a_generator_is_saved_as_its_seed(noise, tiny, tmp_path):
    random_state = np.random.RandomState(5)
    fitted = timeseries.PrimalFormerClassifier(**{**tiny, "random_state": random_state}).fit(*noise)
    assert through_file(fitted, tmp_path).random_state == fitted.recipe_.run.seed


def test_an_estimator_of_another_kind(fitted, tmp_path):
    path = tmp_path / "classifier"
    fitted.save(path)
    with pytest.raises(ValueError, match="no PrimalFormerRegressor: it holds PrimalFormerClass"):
        timeseries.PrimalFormerRegressor.load(path)


def test_the_checkpoint_of_a_run_is_none(tmp_path):
    from primal_attention.training.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "best", {"weight": torch.ones(2)}, {"recipe": "{}"})
    with pytest.raises(ValueError, match="it holds the checkpoint of a training run"):
        timeseries.PrimalFormerClassifier.load(tmp_path / "best")


@pytest.mark.parametrize("content", [b"", b"something else", pickle.dumps({"a": 1}), None])
def test_other_files(fitted, tmp_path, content):
    path = tmp_path / "file"
    fitted.save(path)
    path.write_bytes(path.read_bytes()[:-7] if content is None else content)
    with pytest.raises(ValueError, match="file is no safetensors file, or a damaged one"):
        timeseries.PrimalFormerClassifier.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint is at"):
        timeseries.PrimalFormerClassifier.load(tmp_path / "nothing")


def test_labels_that_no_file_can_hold(fitted, tmp_path):
    fitted.classes_ = np.array([1 + 2j, 3j, 5])
    with pytest.raises(TypeError):
        fitted.save(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_before_there_was_a_machine(fitted, noise, tmp_path):
    from primal_attention.training.checkpoint import read_checkpoint, write_checkpoint

    fitted.save(tmp_path / "new")
    tensors, facts = read_checkpoint(tmp_path / "new")
    facts = {name: facts[name] for name in facts if name not in ("blend", "num_networks")}
    for name in ("preset", "num_features", "num_networks", "max_tokens", "norm", "mixup"):
        del facts["parameters"][name]
    write_checkpoint(tmp_path / "old", tensors, facts)
    old = timeseries.PrimalFormerClassifier.load(tmp_path / "old")
    logits = fitted.network_(**fitted.encoding_.encode(list(noise[0]))).double()
    np.testing.assert_allclose(old.predict_proba(noise[0]), logits.softmax(-1).detach(), atol=1e-6)
    assert old.machine_ is None
