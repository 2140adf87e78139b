import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from primal_attention.tasks import stratified_split

SIZES = st.lists(st.integers(1, 23), min_size=1, max_size=7)
FRACTIONS = st.floats(0.01, 0.99)


def labels_of(sizes, seed=0):
    labels = np.repeat([f"class {i}" for i in range(len(sizes))], sizes)
    return np.random.default_rng(seed).permutation(labels)


@given(SIZES, FRACTIONS, st.integers(0, 2**32))
def test_each_class_gives_its_share_and_keeps_a_case(sizes, fraction, seed):
    splittable = [size for size in sizes if size > 1]
    assume(sum(fraction * size for size in splittable) > 0.5)
    labels = labels_of(sizes, seed)
    kept, held_out = stratified_split(labels, fraction, seed)
    assert sorted([*kept, *held_out]) == list(range(len(labels)))
    assert (np.diff(kept) > 0).all() and (np.diff(held_out) > 0).all()
    for label in np.unique(labels):
        size, number = (labels == label).sum(), (labels[held_out] == label).sum()
        assert number < size
        assert number == 0 if size == 1 else abs(number - fraction * size) <= 1


@given(SIZES, st.floats(0.01, 0.5))
def test_the_total_is_the_nearest_to_the_sum_of_the_shares(sizes, fraction):
    shares = sum(fraction * size for size in sizes if size > 1)
    assume(shares > 0.5)
    _, held_out = stratified_split(labels_of(sizes), fraction, seed=0)
    assert abs(len(held_out) - shares) <= 0.5 + 1e-9


def test_seeds_choose_the_cases():
    labels = labels_of([11, 13, 17])
    first, again, other = (stratified_split(labels, 0.3, seed).held_out for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


def test_shares_of_equal_remainder_are_rounded_up_in_no_fixed_class():
    labels = np.repeat(np.arange(10), 2)  # half a case each: five classes give one
    givers = [set(labels[stratified_split(labels, 0.25, seed).held_out]) for seed in range(20)]
    assert all(len(classes) == 5 for classes in givers)
    assert set.union(*givers) == set(range(10))


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_wrong_fractions(fraction):
    with pytest.raises(ValueError, match=f"fraction .*{fraction}"):
        stratified_split(labels_of([5, 7]), fraction, seed=0)


@pytest.mark.parametrize("shape", [(0,), (3, 2), ()])
def test_wrong_labels(shape):
    with pytest.raises(ValueError, match="one label a case"):
        stratified_split(np.zeros(shape), 0.2, seed=0)


@pytest.mark.parametrize("sizes", [[1, 1, 1], [2]])
def test_nothing_to_hold_out(sizes):
    with pytest.raises(ValueError, match="holds out none"):
        stratified_split(labels_of(sizes), 0.2, seed=0)
