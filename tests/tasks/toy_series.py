"""Small time series whose channels differ in mean and spread."""

import numpy as np

C = 3
NAN = np.nan


def make_series(lengths, channels=C, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** np.arange(channels)[:, None]
    return [(scale * (rng.normal(size=(channels, n)) + 5)).astype(dtype) for n in lengths]
