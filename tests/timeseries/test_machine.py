"""The machine on random convolutions, its blend with networks, and what changes both."""

import numpy as np
import pytest
import torch

from primal_attention import timeseries
from primal_attention.timeseries.augmentation import AugmentedSeries
from primal_attention.timeseries.blend import blend_of_classes, blend_of_numbers
from primal_attention.timeseries.convolutions import RandomConvolutions
from primal_attention.timeseries.ridge import Ridge

FAST = {"preset": "fast", "num_features": 600, "random_state": 0}


def drawn(x, mask, number=600):
    return RandomConvolutions.fit(x, mask, number, torch.Generator().manual_seed(0))


def lengths(n, N, seed=0):
    real = torch.randint(N // 2, N + 1, (n, 1), generator=torch.Generator().manual_seed(seed))
    return torch.arange(N) < real


@pytest.mark.parametrize(("n", "N", "C"), [(5, 1, 1), (7, 9, 2), (30, 33, 3), (4, 100, 40)])
def test_features_are_those_of_the_fit_whatever_the_size(n, N, C):
    x, mask = torch.randn(n, N, C), torch.ones(n, N, dtype=torch.bool)
    convolutions, features = drawn(x, mask)
    assert features.shape[1] <= max(600, 6 * 2 * len(convolutions.taps))
    torch.testing.assert_close(convolutions(x, mask), features, atol=2e-3, rtol=1e-3)
    assert features.isfinite().all()
    assert features.mean(0).abs().max() < 1e-3


def test_padding_changes_no_feature():
    x, mask = torch.randn(20, 31, 3), lengths(20, 31)
    x = x * mask[..., None]
    convolutions, _ = drawn(x, mask)
    longer = torch.nn.functional.pad(x, (0, 0, 0, 9)), torch.nn.functional.pad(mask, (0, 9))
    fraction, excess = (convolutions(*each) for each in ((x, mask), longer))
    K = convolutions.taps.shape[1]  # features come as fraction, excess, place; places are relative
    kinds = torch.arange(fraction.shape[1]) // K % 3 < 2
    torch.testing.assert_close(fraction[:, kinds], excess[:, kinds], atol=2e-3, rtol=1e-3)


def test_predictions_left_one_out_are_those_of_machines_without_the_case(monkeypatch):
    monkeypatch.setattr("primal_attention.timeseries.ridge.PENALTIES", (0.1,))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(23, 40, generator=generator, dtype=torch.float64)
    targets = torch.randn(23, 2, generator=generator, dtype=torch.float64)
    weight = torch.rand(23, generator=generator, dtype=torch.float64) + 0.5
    ridge, left_out = Ridge.fit(features, targets, weight)
    for case in (0, 7, 22):
        rest = torch.arange(23) != case
        without, _ = Ridge.fit(features[rest], targets[rest], weight[rest])
        torch.testing.assert_close(without(features[case]), left_out[case])
    residual = targets - ridge(features)
    gradient = features.T @ (weight[:, None] * residual) / 40  # it minimises the weighted loss
    torch.testing.assert_close(gradient, 0.1 * ridge.weights)
    torch.testing.assert_close((weight @ residual).abs().max(), torch.tensor(0.0).double())


def test_the_blend_of_classes_finds_what_helps_and_its_temperature():
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(3, (400,), generator=generator)
    logits = torch.randn(400, 3, generator=generator)
    logits[torch.arange(400), target] += 1.5
    noise = torch.randn(400, 3, generator=generator)
    ones = torch.ones(400).double()
    kept, dropped = blend_of_classes(8 * logits, noise, target, ones)
    assert dropped == 0 and kept * 8 == pytest.approx(1.5, rel=0.5)
    useful = logits + 0.5 * noise  # errors of their own make both worth more than one
    other = logits - 0.5 * noise
    assert all(0.2 < each < 2 for each in blend_of_classes(useful, other, target, ones))
    assert blend_of_classes(None, logits, target, ones)[0] == 0
    assert blend_of_classes(logits, None, target, ones)[1] == 0


def test_the_blend_of_numbers_is_a_mean_of_both():
    target = torch.linspace(-1, 1, 41).double()
    above, below = target[:, None] + 0.3, target[:, None] - 0.1
    ones = torch.ones(41).double()
    assert blend_of_numbers(above, below, target, ones) == (0.25, 0.75)
    assert blend_of_numbers(above, None, target, ones) == (1, 0)
    assert blend_of_numbers(None, below, target, ones) == (0, 1)


@pytest.mark.parametrize("networks", [0, 1, 2])
def test_presets_and_parts_come_back_from_a_file(waves, tiny, networks, tmp_path):
    X, frequency = waves(61)
    y = np.where(frequency < 1.6, "slow", "fast")
    settings = {**tiny, "num_features": 600, "num_networks": networks}
    fitted = timeseries.PrimalFormerClassifier(**settings).fit(X, y)
    assert len(fitted.history_) == networks
    fitted.save(tmp_path / "file")
    again = timeseries.PrimalFormerClassifier.load(tmp_path / "file")
    assert np.array_equal(again.predict_proba(X), fitted.predict_proba(X))
    again.save(tmp_path / "again")


def test_the_machine_alone_learns_classes_and_numbers(waves):
    X, frequency = waves(131)
    X_test, frequency_test = waves(97, seed=1)
    classifier = timeseries.PrimalFormerClassifier(**FAST).fit(X, frequency < 1.6)
    assert classifier.network_ is None
    assert classifier.score(X_test, frequency_test < 1.6) > 0.9
    regressor = timeseries.PrimalFormerRegressor(**FAST).fit(X, 1e4 + 100 * frequency)
    assert regressor.score(X_test, 1e4 + 100 * frequency_test) > 0.8


def test_both_count_where_nothing_is_held_out(noise, tiny):
    X, y = noise
    settings = {**tiny, "num_features": 60, "valid_fraction": None}
    machine, network = timeseries.PrimalFormerClassifier(**settings).fit(X, y).blend_
    assert machine > 0 and network == 1
    assert timeseries.PrimalFormerRegressor(**settings).fit(X, X[:, 0, 0]).blend_ == (0.5, 0.5)


def test_probabilities_are_calibrated(waves):
    """Half of the labels are drawn anew: nothing can be sure of them."""
    X, frequency = waves(300)
    rng = np.random.default_rng(0)
    y = np.where(rng.random(300) < 0.5, frequency < 1.6, rng.random(300) < 0.5)
    said = timeseries.PrimalFormerClassifier(**FAST).fit(X[:200], y[:200]).predict_proba(X[200:])
    sure, right = said.max(1).mean(), (said.argmax(1) == y[200:]).mean()
    assert sure == pytest.approx(right, abs=0.12)
    assert right < 0.9


@pytest.mark.parametrize("network", [False, True])
def test_weights_of_cases_and_classes_count(noise, tiny, network):
    X, y = noise
    changed = {**tiny, "epochs": 12, "lr": 1e-2} if network else FAST
    weight = np.where(y == 1, 20.0, 1.0)
    plain = timeseries.PrimalFormerClassifier(**changed).fit(X, y)
    by_case = timeseries.PrimalFormerClassifier(**changed).fit(X, y, sample_weight=weight)
    by_class = timeseries.PrimalFormerClassifier(**changed, class_weight={0: 1, 1: 20, 2: 1})
    by_class.fit(X, y)
    others = np.random.default_rng(1).normal(size=(40, 3, 17))
    means = [each.predict_proba(others)[:, 1].mean() for each in (plain, by_case, by_class)]
    assert means[1] == pytest.approx(means[2], abs=1e-9)
    assert means[1] > means[0]
    balanced = timeseries.PrimalFormerClassifier(**changed, class_weight="balanced").fit(X, y)
    assert balanced.predict(others).shape == (40,)


def test_weights_that_are_none(noise, tiny):
    X, y = noise
    with pytest.raises(ValueError, match="sample_weight must have one positive number a case, 29"):
        timeseries.PrimalFormerClassifier(**tiny).fit(X, y, sample_weight=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"class_weight .* without one: \[2\]"):
        timeseries.PrimalFormerClassifier(**tiny, class_weight={0: 1, 1: 2}).fit(X, y)
    with pytest.raises(ValueError, match="preset must be one of fast, default, best, got 'quick'"):
        timeseries.PrimalFormerClassifier(**{**tiny, "preset": "quick"}).fit(X, y)
    with pytest.raises(ValueError, match="nor both zero, got 0 and 0"):
        timeseries.PrimalFormerClassifier(**tiny, num_networks=0).fit(X, y)


def test_a_warm_start_goes_on(noise, tiny):
    X, y = noise
    classifier = timeseries.PrimalFormerClassifier(**tiny, warm_start=True, refit=False)
    first = [classifier.fit(X, y).history_[-1]["train_loss"] for _ in range(8)]
    assert first[-1] < first[0] - 0.01
    cold = timeseries.PrimalFormerClassifier(**tiny, refit=False)
    assert cold.fit(X, y).history_ == cold.fit(X, y).history_


def test_callbacks_are_called_after_each_round(noise, tiny):
    seen = []
    settings = {**tiny, "epochs": 3, "patience": 9, "callbacks": [seen.append]}
    classifier = timeseries.PrimalFormerClassifier(**settings).fit(*noise)
    assert seen[:3] == classifier.history_
    assert len(seen) == 4  # the last is of the network that is trained anew


def test_a_batch_of_predictions_may_have_any_size(noise, tiny):
    classifier = timeseries.PrimalFormerClassifier(**{**tiny, "num_features": 600}).fit(*noise)
    said = classifier.predict_proba(noise[0])
    one = classifier.set_params(predict_batch_size=1).predict_proba(noise[0])
    np.testing.assert_allclose(one, said, atol=1e-5)


def test_series_are_changed_in_training_and_padding_stays_zero():
    torch.manual_seed(0)
    mask = lengths(6, 20)
    x = torch.randn(6, 20, 4) * mask[..., None]
    cases = AugmentedSeries({"x": x, "token_mask": mask}, torch.eye(6), noise=0.1, time_mask=0.2)
    every = torch.arange(6)
    batch = cases.drawn(every)
    assert (batch.inputs["x"][~mask] == 0).all()
    assert ((batch.inputs["x"] == 0).all(-1) & mask).any()
    assert torch.equal(batch.target, torch.eye(6))
    plain = AugmentedSeries({"x": x, "token_mask": mask}, torch.eye(6)).drawn(every)
    assert torch.equal(plain.inputs["x"], x)
    mixed = AugmentedSeries({"x": x, "token_mask": mask}, torch.eye(6), mixup=1.0).drawn(every)
    torch.testing.assert_close(mixed.target.sum(1), torch.ones(6))
    assert (mixed.target.diagonal() >= 0.5).all() and (mixed.target.diagonal() < 1).any()
    torch.testing.assert_close(mixed.inputs["x"], torch.einsum("ij,jnc->inc", mixed.target, x))
    hidden = AugmentedSeries({"x": x, "token_mask": mask}, torch.eye(6), channel_dropout=0.5)
    assert ((hidden.drawn(every).inputs["x"] == 0) & mask[..., None]).all(1).any()


def test_longer_series_have_fewer_tokens(noise, tiny):
    X = np.random.default_rng(0).normal(size=(29, 2, 130))
    classifier = timeseries.PrimalFormerClassifier(**{**tiny, "max_tokens": 20}).fit(X, noise[1])
    assert classifier.network_.tower.embedding.positions.shape[0] == 19  # every seventh step
    assert classifier.predict_proba(X[:3]).shape == (3, 3)


def test_a_preset_is_chosen_on_folds_of_the_cases(waves, monkeypatch):
    X, frequency = waves(45)
    y = np.where(frequency < 1.6, "slow", "fast")
    settings = {"num_features": 60, "dim": 8, "num_heads": 2, "epochs": 1}
    chosen = timeseries.select_preset(X, y, ("fast", "default"), random_state=3, **settings)
    assert chosen.seeds == [3, 4, 5]
    means = {preset: np.mean(each) for preset, each in chosen.accuracies.items()}
    assert list(means) == ["fast", "default"]
    assert chosen.preset == ("default" if means["default"] > means["fast"] else "fast")
    assert means["fast"] > 0.6
    assert chosen == timeseries.select_preset(X, y, ("fast", "default"), random_state=3, **settings)
