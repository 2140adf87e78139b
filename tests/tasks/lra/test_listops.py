import random

import numpy as np
import pytest

from primal_attention.tasks.lra import ListOpsSettings, make_trees
from primal_attention.tasks.lra.listops import SYMBOLS

SHALLOW = ListOpsSettings(max_depth=4, min_length=0, max_length=2048)  # no tree is left out


def text(row):
    return " ".join(SYMBOLS[i - 1] for i in row[row > 0])


def work_out(words):
    """The value of a text, by recursion; takes its words away."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word)
    args = []
    while words[0] != "]":
        args.append(work_out(words))
    words.pop(0)
    match word:
        case "[MIN":
            return min(args)
        case "[MAX":
            return max(args)
        case "[SM":
            return sum(args) % 10
        case "[MED":
            return int(np.median(args))


def nodes(words, depth=1):
    """Depth, word and number of arguments of every node of a text."""
    word, num_args, below = words.pop(0), 0, []
    if word.startswith("["):
        while words[0] != "]":
            below += nodes(words, depth + 1)
            num_args += 1
        words.pop(0)
    return [(depth, word, num_args), *below]


@pytest.fixture(scope="module")
def trees():
    return make_trees(ListOpsSettings(), 3, 0, 1000)


@pytest.fixture(scope="module")
def shallow():
    tokens = make_trees(SHALLOW, 5, 0, 600).tokens
    return [node for row in tokens for node in nodes(text(row).split())]


def test_every_value_is_that_of_the_text(trees):
    for row, value in zip(trees.tokens[:300], trees.values[:300], strict=True):
        words = text(row).split()
        assert work_out(words) == value
        assert words == []  # the text is one tree


def test_values_of_short_trees():
    tokens, values = make_trees(SHALLOW, 7, 0, 600)
    assert [work_out(text(row).split()) for row in tokens] == values.tolist()


def test_lengths_lie_between_the_bounds_and_padding_is_at_the_end(trees):
    lengths = (trees.tokens > 0).sum(axis=1)
    assert trees.tokens.shape == (1000, 2048) and trees.tokens.dtype == np.uint8
    assert lengths.min() > 500 and lengths.max() < 2000
    assert lengths.min() < 520 and lengths.max() > 1900  # up to the bounds
    assert ((trees.tokens > 0) == (np.arange(2048) < lengths[:, None])).all()


def test_depth_and_arguments_lie_between_their_bounds(trees):
    found = [node for row in trees.tokens[:100] for node in nodes(text(row).split())]
    assert max(depth for depth, _, _ in found) == 10
    assert max(depth for depth, _, num_args in found if num_args) == 9
    assert {num_args for _, _, num_args in found} == {0, *range(2, 11)}


def naive_length(rng, depth=1):
    """The length of a tree by the recursion that defines it."""
    if depth == 10 or rng.random() > 0.25:
        return 1
    return 2 + sum(naive_length(rng, depth + 1) for _ in range(rng.randint(2, 10)))


def test_lengths_are_distributed_as_defined(trees):
    rng, defined = random.Random(1), []
    while len(defined) < 400:
        if 500 < (length := naive_length(rng)) < 2000:
            defined.append(length)
    at = np.arange(500, 2000, 10)
    ours = np.searchsorted(np.sort((trees.tokens > 0).sum(axis=1)), at) / 1000
    theirs = np.searchsorted(np.sort(defined), at) / 400
    assert np.abs(ours - theirs).max() < 1.63 * np.sqrt(1 / 1000 + 1 / 400)  # 1 % of the time not


def share(values, wanted):
    return np.mean([value == wanted for value in values])


def test_a_quarter_of_the_inner_nodes_are_operators(shallow):
    inner = [num_args > 0 for depth, _, num_args in shallow if depth in (2, 3)]
    assert np.mean(inner) == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / len(inner)))


def test_operators_digits_and_numbers_of_arguments_are_equally_likely(shallow):
    operators = [word for _, word, num_args in shallow if num_args]
    digits = [word for _, word, num_args in shallow if not num_args]
    args = [num_args for _, _, num_args in shallow if num_args]
    for values, choices in (
        (operators, SYMBOLS[10:14]),
        (digits, SYMBOLS[:10]),
        (args, range(2, 11)),
    ):
        p = 1 / len(choices)
        for choice in choices:
            assert share(values, choice) == pytest.approx(p, abs=4 * np.sqrt(p / len(values)))


def test_the_outermost_operator_answers_a_third(trees):
    """By its most frequent value: what networks reach that see no more of a tree."""
    tokens, values = trees
    roots = np.unique(tokens[:, 0])
    right = sum(np.bincount(values[tokens[:, 0] == root]).max() for root in roots)
    assert len(roots) == 4
    assert 0.33 < right / len(values) < 0.42
    assert np.bincount(values).max() / len(values) < 0.22


def test_trees_depend_on_seed_and_chunk():
    same, again, other_seed, other_chunk = (
        make_trees(SHALLOW, *key, 50).tokens.tobytes() for key in ((1, 2), (1, 2), (2, 2), (1, 3))
    )
    assert same == again
    assert len({same, other_seed, other_chunk}) == 3
