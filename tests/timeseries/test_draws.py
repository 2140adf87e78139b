"""Estimators whose networks have Gaussian processes on their scores."""

import numpy as np
import pytest
import torch

from primal_attention.timeseries import PrimalFormerClassifier, PrimalFormerRegressor
from primal_attention.uncertainty import is_uncertain, posterior_samples


@pytest.mark.parametrize("num_networks", [1, 2])
def test_probabilities_are_means_over_draws(waves, tiny, tmp_path, num_networks):
    X, frequency = waves(40)
    y = np.where(frequency < 1.6, "slow", "fast")
    given = {**tiny, "uncertainty": True, "num_networks": num_networks}
    classifier = PrimalFormerClassifier(**given).fit(X, y)
    assert is_uncertain(classifier.network_)
    state = torch.get_rng_state()
    said = classifier.predict_proba(X)
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(classifier.predict_proba(X), said)
    np.testing.assert_array_equal(classifier.classes_[said.argmax(1)], classifier.predict(X))
    np.testing.assert_allclose(said.sum(1), 1)

    factor = classifier.blend_[1]
    inputs = classifier.encoding_.encode(list(X))
    with torch.no_grad(), posterior_samples(classifier.network_), torch.random.fork_rng():
        torch.manual_seed(0)
        each = [classifier.network_(**inputs).softmax(-1) for _ in range(10)]
    expected = (sum(each).double() / 10).pow(factor)
    np.testing.assert_allclose(said, expected / expected.sum(1, keepdim=True), rtol=1e-4)

    classifier.save(tmp_path / "file.safetensors")
    loaded = PrimalFormerClassifier.load(tmp_path / "file.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(X), said)


def test_regressors_have_no_probabilities(waves, tiny):
    with pytest.raises(ValueError, match="PrimalFormerRegressor uncertainty=False"):
        PrimalFormerRegressor(**tiny, uncertainty=True).fit(*waves(20))
