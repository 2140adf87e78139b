import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from primal_attention.tasks import SeriesEncoding

from .toy_series import NAN, C, make_series

LENGTHS = (7, 11, 2, 5)


def with_gaps(series, seed=0):
    rng = np.random.default_rng(seed)
    return [np.where(rng.random(case.shape) < 0.3, NAN, case) for case in series]


def filled_by_definition(values):
    """One channel: on the line between the neighbours in time that are observed."""
    observed = [t for t, value in enumerate(values) if not np.isnan(value)]
    filled = []
    for t, value in enumerate(values):
        before = [s for s in observed if s <= t]
        after = [s for s in observed if s >= t]
        if not observed:
            filled.append(0.0)
        elif not before or not after:
            filled.append(values[after[0] if after else before[-1]])
        elif before[-1] == after[0]:
            filled.append(value)
        else:
            left, right = before[-1], after[0]
            slope = (values[right] - values[left]) / (right - left)
            filled.append(values[left] + slope * (t - left))
    return filled


def encoded_by_definition(train, series):
    """Plain loops in float64."""
    num_tokens = max(case.shape[1] for case in train)
    x = np.zeros((len(series), num_tokens, C))
    mask = np.zeros((len(series), num_tokens), dtype=bool)
    for c in range(C):
        observed = [float(v) for case in train for v in case[c] if not np.isnan(v)]
        mean = sum(observed) / len(observed)
        std = (sum((v - mean) ** 2 for v in observed) / len(observed)) ** 0.5
        for b, case in enumerate(series):
            for t, value in enumerate(filled_by_definition((np.float64(case[c]) - mean) / std)):
                if t < num_tokens:
                    x[b, t, c], mask[b, t] = value, True
    return x, mask


@pytest.mark.parametrize("gaps", [False, True])
def test_the_encoding_is_the_plain_loop(gaps):
    train, new = (
        make_series(LENGTHS),
        make_series((13, 1, 11, 3), seed=1),
    )  # one longer than any of train
    if gaps:
        train, new = with_gaps(train, 2), with_gaps(new, 3)
    inputs = SeriesEncoding.fit(train).encode(new)
    x, mask = encoded_by_definition(train, new)
    assert inputs["x"].dtype == torch.float32 and inputs["token_mask"].dtype == torch.bool
    np.testing.assert_allclose(inputs["x"], x, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(inputs["token_mask"], mask)


def test_training_cases_are_standardised():
    inputs = SeriesEncoding.fit(train := make_series(LENGTHS)).encode(train)
    tokens = inputs["x"][inputs["token_mask"]].double()
    torch.testing.assert_close(tokens.mean(0), torch.zeros(C).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(tokens.std(0, correction=0), torch.ones(C).double())
    assert (inputs["x"][~inputs["token_mask"]] == 0).all()


def test_large_offsets_do_not_cost_the_digits():
    """Statistics in float32 would be off by more than the spread."""
    series = [
        case.astype(np.float64) / 10 ** np.arange(C)[:, None] + 1e9 for case in make_series(LENGTHS)
    ]
    inputs = SeriesEncoding.fit(series).encode(series)
    tokens = inputs["x"][inputs["token_mask"]].double()
    torch.testing.assert_close(tokens.std(0, correction=0), torch.ones(C).double())


@given(st.lists(st.one_of(st.just(NAN), st.floats(-1e3, 1e3)), min_size=1, max_size=17))
def test_gaps_lie_on_the_line_between_their_neighbours(values):
    encoding = SeriesEncoding(np.zeros(1), np.ones(1), num_tokens=len(values))
    x = encoding.encode([np.array([values])])["x"][0, :, 0]
    np.testing.assert_allclose(x, filled_by_definition(np.array(values)), rtol=1e-5, atol=1e-3)


def test_gaps_are_filled_from_beyond_the_clip():
    encoding = SeriesEncoding(np.zeros(1), np.ones(1), num_tokens=3)
    x = encoding.encode([np.array([[0.0, NAN, NAN, NAN, 4.0]])])["x"]
    assert x.flatten().tolist() == [0, 1, 2]


def test_a_channel_that_a_case_lacks_is_at_its_mean():
    train = make_series(LENGTHS)
    case = train[0].copy()
    case[1] = NAN
    x = SeriesEncoding.fit(train).encode([case])["x"]
    assert (x[..., 1] == 0).all() and (x[0, : LENGTHS[0], 0] != 0).all()


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e8, 1e-20])
def test_a_constant_channel_is_not_scaled(constant):
    train = make_series(LENGTHS, dtype=np.float64)
    for case in train:
        case[1] = constant
    encoding = SeriesEncoding.fit(train)
    assert encoding.std[1] == 1
    assert encoding.encode(train)["x"][..., 1].abs().max() < 1e-6


def test_a_channel_without_observation():
    train = make_series(LENGTHS)
    for case in train:
        case[1] = NAN
    encoding = SeriesEncoding.fit(train)
    assert (encoding.mean[1], encoding.std[1]) == (0, 1)
    assert (encoding.encode(train)["x"][..., 1] == 0).all()


def test_small_units_are_scaled():
    encoding = SeriesEncoding.fit([case * 1e-15 for case in make_series(LENGTHS, dtype=np.float64)])
    assert (encoding.std < 1e-10).all()


def test_no_cases_are_encoded_as_none():
    inputs = SeriesEncoding.fit(make_series(LENGTHS)).encode([])
    assert inputs["x"].shape == (0, 11, C) and inputs["token_mask"].shape == (0, 11)


def test_cases_as_one_array():
    series = make_series((7, 7, 7, 7))
    encoding = SeriesEncoding.fit(np.stack(series))
    assert torch.equal(encoding.encode(np.stack(series))["x"], encoding.encode(series)["x"])


@pytest.mark.parametrize("infinite", [np.inf, -np.inf])
def test_infinite_values(infinite):
    encoding = SeriesEncoding.fit(series := make_series(LENGTHS))
    series[2][1, 0] = infinite
    for refuse in (encoding.encode, SeriesEncoding.fit):
        with pytest.raises(ValueError, match="case 2, channel 1"):
            refuse(series)


def test_values_too_large_for_float32():
    encoding = SeriesEncoding.fit(series := make_series(LENGTHS, dtype=np.float64))
    series[3][2, 1] = 1e100
    with pytest.raises(ValueError, match="case 3, channel 2"):
        encoding.encode(series)
    series[3][2, 1] = 1e200  # its square is infinite
    with pytest.raises(ValueError, match="std positive"):
        SeriesEncoding.fit(series)


@pytest.mark.parametrize("shape", [(C + 1, 5), (C,), (C, 5, 1), ()])
def test_wrong_shapes(shape):
    encoding = SeriesEncoding.fit(series := make_series(LENGTHS))
    series[1] = np.zeros(shape)
    for refuse in (encoding.encode, SeriesEncoding.fit):
        with pytest.raises(ValueError, match=r"case 1 .*3 channels"):
            refuse(series)


def test_empty_cases():
    encoding = SeriesEncoding.fit(series := make_series(LENGTHS))
    series[3] = np.zeros((C, 0))
    for refuse in (encoding.encode, SeriesEncoding.fit):
        with pytest.raises(ValueError, match="case 3 is empty"):
            refuse(series)
    with pytest.raises(ValueError, match="no case"):
        SeriesEncoding.fit([])
    with pytest.raises(ValueError, match="case 0 is empty"):
        SeriesEncoding.fit([np.zeros((0, 5))])


def test_an_encoding_goes_through_json():
    encoding = SeriesEncoding.fit(with_gaps(make_series(LENGTHS)))
    again = SeriesEncoding.from_dict(json.loads(json.dumps(encoding.to_dict())))
    new = with_gaps(make_series((13, 2), seed=1))
    assert torch.equal(encoding.encode(new)["x"], again.encode(new)["x"])
    assert again.num_channels == C


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": [0.0]}, "one value a channel"),
        ({"mean": [], "std": []}, "one value a channel"),
        ({"mean": [0.0, NAN, 0.0]}, "finite"),
        ({"std": [1.0, 0.0, 1.0]}, "positive"),
        ({"num_tokens": 0}, "num_tokens"),
    ],
)
def test_wrong_encodings(change, message):
    values = SeriesEncoding.fit(make_series(LENGTHS)).to_dict()
    with pytest.raises(ValueError, match=message):
        SeriesEncoding.from_dict({**values, **change})


def test_a_value_of_an_encoding_is_missing():
    values = SeriesEncoding.fit(make_series(LENGTHS)).to_dict()
    del values["std"]
    with pytest.raises(ValueError, match="needs 'std'"):
        SeriesEncoding.from_dict(values)
