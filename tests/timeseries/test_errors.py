"""What cannot be done is refused by name."""

import numpy as np
import pytest

from primal_attention import timeseries


@pytest.mark.parametrize("method", ["predict", "predict_proba", "save"])
def test_not_fitted(noise, tiny, method):
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError, match="PrimalFormerClassifier has not been fitted"):
        getattr(timeseries.PrimalFormerClassifier(**tiny), method)(noise[0])


def test_one_class(noise, tiny):
    with pytest.raises(ValueError, match="at least 2 unique labels, but found 1"):
        timeseries.PrimalFormerClassifier(**tiny).fit(noise[0], np.zeros(29))


def test_wrong_channels(noise, tiny):
    classifier = timeseries.PrimalFormerClassifier(**tiny).fit(*noise)
    with pytest.raises(ValueError, match="channels"):
        classifier.predict(noise[0][:, :2])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "mps"}, "device must be one of auto, cpu, cuda, got 'mps'"),
        ({"valid_fraction": 1.5}, r"valid_fraction must be in \(0, 1\) or None, got 1.5"),
        ({"n_jobs": 1.5}, "n_jobs must be an integer or None, got 1.5"),
        ({"model": "primalforme"}, "model must be one of .*, got 'primalforme'"),
        ({"dim": 15}, "dim must be a multiple of num_heads"),
        ({"lr": 0}, "lr must be positive, got 0"),
        ({"pooling": "max"}, "pooling must be one of .*, got 'max'"),
    ],
)
def test_wrong_parameters(noise, tiny, wrong, message):
    with pytest.raises(ValueError, match=message):
        timeseries.PrimalFormerClassifier(**{**tiny, **wrong}).fit(*noise)


def test_a_gpu_that_is_not_there(noise, tiny, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="PyTorch sees no GPU"):
        timeseries.PrimalFormerClassifier(**tiny, device="cuda").fit(*noise)
