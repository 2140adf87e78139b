"""The estimators learn: classes, numbers, series of unequal lengths, series with gaps."""

import numpy as np
import pytest
import torch

from primal_attention import timeseries


def speed(frequency):
    return np.where(frequency < 1.6, "slow", "fast")


def cut(X, seed=0):
    """The series at lengths of their own."""
    lengths = np.random.default_rng(seed).integers(19, 32, len(X))
    return [case[:, :length] for case, length in zip(X, lengths, strict=True)]


def with_gaps(X, seed=0):
    return np.where(np.random.default_rng(seed).random(X.shape) < 0.2, np.nan, X)


@pytest.mark.parametrize("change", [np.asarray, cut, with_gaps])
def test_the_classifier_learns(waves, able, change):
    X, frequency = waves(131)
    X_test, frequency_test = waves(97, seed=1)
    classifier = timeseries.PrimalFormerClassifier(**able).fit(change(X), speed(frequency))
    assert classifier.score(change(X_test), speed(frequency_test)) > 0.85


def test_the_regressor_learns(waves, able):
    X, frequency = waves(131)
    X_test, frequency_test = waves(97, seed=1)
    regressor = timeseries.PrimalFormerRegressor(**able).fit(X, 1e4 + 100 * frequency)
    assert regressor.score(X_test, 1e4 + 100 * frequency_test) > 0.8


def test_data_that_aeon_ships_are_learnt(able):
    from aeon.datasets import load_japanese_vowels

    X, y = load_japanese_vowels(split="train")  # unequal lengths, 9 speakers
    X_test, y_test = load_japanese_vowels(split="test")
    classifier = timeseries.PrimalFormerClassifier(**{**able, "epochs": 6}).fit(X, y)
    assert classifier.score(X_test, y_test) > 0.85


@pytest.mark.parametrize(
    "labels",
    [
        np.array([7, 3, 5]),
        np.array(["walking", "run", "sit"]),
        np.array(["walking", "run", "sit"], dtype=object),
        np.array([1.0, -2.0, 4.0]),
    ],
)
def test_labels_come_back_as_they_are(noise, tiny, labels, tmp_path):
    X, classes = noise
    y = labels[classes]
    classifier = timeseries.PrimalFormerClassifier(**tiny).fit(X, y)
    classifier.save(tmp_path / "classifier")
    for each in (classifier, timeseries.PrimalFormerClassifier.load(tmp_path / "classifier")):
        predicted = each.predict(X)
        assert predicted.dtype == y.dtype
        assert set(predicted) <= set(y)
        assert each.classes_.tolist() == sorted(labels.tolist())
        best = each.classes_[each.predict_proba(X).argmax(1)]
        assert best.tolist() == predicted.tolist()


def test_probabilities(noise, tiny):
    X, y = noise
    probabilities = timeseries.PrimalFormerClassifier(**tiny).fit(X, y).predict_proba(X)
    assert probabilities.shape == (29, 3)
    assert (probabilities > 0).all()
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-12)


def test_a_case_does_not_depend_on_the_others(noise, tiny):
    """Neither padding nor the cases beside it change what is said of one."""
    X, y = noise
    series = cut(X, seed=1)
    classifier = timeseries.PrimalFormerClassifier(**tiny).fit(series, y)
    together = classifier.predict_proba(series)
    alone = np.concatenate([classifier.predict_proba([case]) for case in series])
    np.testing.assert_allclose(alone, together, atol=1e-6)
    assert np.ptp(together, axis=0).min() > 1e-4


def test_more_cases_than_one_batch(noise, tiny):
    X, y = noise
    classifier = timeseries.PrimalFormerClassifier(**tiny).fit(X, y)
    many = classifier.predict_proba(np.tile(X, (11, 1, 1)))
    np.testing.assert_allclose(many, np.tile(classifier.predict_proba(X), (11, 1)), atol=1e-6)


def test_longer_series_are_clipped(noise, tiny):
    X, y = noise
    classifier = timeseries.PrimalFormerClassifier(**tiny).fit(X, y)
    longer = np.concatenate([X, np.full((29, 3, 5), 1e6)], axis=2)
    assert np.array_equal(classifier.predict_proba(longer), classifier.predict_proba(X))


def test_one_channel_needs_no_axis(noise, tiny):
    X, y = noise
    flat = timeseries.PrimalFormerClassifier(**tiny).fit(X[:, 0], y).predict_proba(X[:, 0])
    assert np.array_equal(
        flat, timeseries.PrimalFormerClassifier(**tiny).fit(X[:, :1], y).predict_proba(X[:, :1])
    )


@pytest.mark.parametrize("name", timeseries.ESTIMATORS)
def test_equal_seeds_give_equal_results(noise, tiny, name):
    X, y = noise
    estimator = getattr(timeseries, name)
    y = y if name == "PrimalFormerClassifier" else X[:, 0].mean(1)

    def outputs(seed):
        fitted = estimator(**{**tiny, "random_state": seed}).fit(X, y)
        return (fitted.predict_proba if hasattr(fitted, "predict_proba") else fitted.predict)(X)

    assert np.array_equal(outputs(3), outputs(3))
    assert np.array_equal(outputs(3), outputs(np.random.RandomState(3)))
    assert not np.array_equal(outputs(3), outputs(4))


def test_the_best_epoch_is_kept(noise, tiny):
    """On noise the network soon gets worse: it is stopped, and the weights are those before."""
    X, y = noise
    settings = {**tiny, "epochs": 40, "lr": 1e-2, "patience": 5}
    classifier = timeseries.PrimalFormerClassifier(**settings).fit(X, y)
    history = classifier.history_
    best = max(
        range(len(history)), key=lambda i: (history[i]["valid_accuracy"], -history[i]["valid_loss"])
    )
    assert len(history) == best + 1 + 5 < 40
    stopped = timeseries.PrimalFormerClassifier(
        **{**settings, "epochs": best + 1, "patience": None}
    ).fit(X, y)
    kept, wanted = (each.network_.state_dict() for each in (classifier, stopped))
    assert all(torch.equal(kept[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("y", "fraction"),
    [
        ([0, 1] * 4, 0.2),  # fewer than ten cases
        ([0, 1] * 8 + [2], 0.2),  # a class of one case
        ([0, 1] * 8, None),
        ([0, 1] * 8, 0.05),  # less than one case
    ],
)
def test_nothing_is_held_out_of_few_cases(noise, tiny, y, fraction):
    X = noise[0][: len(y)]
    settings = {**tiny, "epochs": 7, "patience": 1, "valid_fraction": fraction}
    classifier = timeseries.PrimalFormerClassifier(**settings).fit(X, np.array(y))
    (entry,) = classifier.history_  # one evaluation, after all epochs
    assert entry["epoch"] == 7
    assert classifier.predict(X).shape == (len(y),)


def test_everything_else_is_left_alone(noise, tiny, capfd):
    X, y = noise
    torch.manual_seed(7)
    before = torch.get_rng_state(), torch.get_num_threads()
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    copy = X.copy()
    classifier = timeseries.PrimalFormerClassifier(**{**tiny, "n_jobs": 2}).fit(X, y)
    classifier.predict(X)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    assert np.array_equal(X, copy)
    assert capfd.readouterr() == ("", "")


def test_a_verbose_fit_tells_how_it_goes(noise, tiny, capfd):
    timeseries.PrimalFormerClassifier(**tiny, verbose=True).fit(*noise)
    out, err = capfd.readouterr()
    assert out == ""
    assert "epoch 2/2" in err


def test_threads_are_those_asked_for(noise, tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    timeseries.PrimalFormerClassifier(**{**tiny, "n_jobs": 3}).fit(*noise).predict(noise[0])
    assert asked[::2] == [3, 3]


@pytest.mark.parametrize("model", ["primal_plus", "softmax", "reformer", "yoso"])
def test_other_models(noise, tiny, model):
    X, y = noise
    settings = {**tiny, "model": model, "num_layers": 2, "eta": 0.1}
    classifier = timeseries.PrimalFormerClassifier(**settings).fit(X, y)
    said = classifier.predict_proba(X)
    torch.manual_seed(7)
    assert np.array_equal(classifier.predict_proba(X), said)


def test_options_reach_the_attention(noise, tiny):
    tiny = {**tiny, "model": "primalformer"}
    settings = {**tiny, "landmark_jitter": 0.5, "attention": {"weights": "sampled", "bias": False}}
    network = timeseries.PrimalFormerClassifier(**settings).fit(*noise).network_
    (layer,) = (each.attention for each in network.tower.encoder.blocks)
    assert (layer.num_directions, layer.landmark_jitter) == (5, 0.5)
    assert layer.q_proj.bias is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu(noise, tiny):
    X, y = noise
    classifier = timeseries.PrimalFormerClassifier(**tiny, device="cuda").fit(X, y)
    on_gpu = classifier.predict_proba(X)
    assert {each.device.type for each in classifier.network_.parameters()} == {"cpu"}
    on_cpu = classifier.set_params(device="cpu").predict_proba(X)
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-3)
