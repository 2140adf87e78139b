import numpy as np
import pytest

SMALL = {
    "num_features": 0,
    "num_layers": 1,
    "dim": 14,
    "num_heads": 2,
    "ffn_dim": 23,
    "num_directions": 5,
    "samples_per_direction": 3,
    "random_state": 0,
}


@pytest.fixture
def tiny():
    """Parameters of an estimator that is fitted in a moment and knows little."""
    return {**SMALL, "epochs": 2}


@pytest.fixture
def able():
    """Parameters of one that can tell waves apart."""
    return {**SMALL, "epochs": 16, "lr": 1e-2, "pooling": "flatten"}


@pytest.fixture(scope="session")
def waves():
    """Noisy waves [n, 2, 31] of random phases, and the frequency of each."""

    def make(n, seed=0):
        rng = np.random.default_rng(seed)
        frequency = rng.uniform(0.5, 3, n)
        phases = rng.uniform(size=(n, 2, 1))
        angles = frequency[:, None, None] * np.linspace(0, 1, 31) + phases
        return np.sin(2 * np.pi * angles) + 0.1 * rng.normal(size=angles.shape), frequency

    return make


@pytest.fixture
def noise():
    """Series [29, 3, 17] and as many labels of three classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(29, 3, 17)), np.arange(29) % 3
