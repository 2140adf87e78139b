"""ListOps: nested operations on digits, to be worked out from their text (Nangia & Bowman, 2018).

Trees are grown level by level, many at a time, with the distribution of the Long Range Arena: below
the greatest depth a node is an operator with probability 1/4, with 2 to 10 arguments, else a digit.
The length of a tree is its number of symbols: one a digit and two an operator, for its name and for
the bracket that closes it. Brackets that open and parentheses are no symbols of their own.

Letters: T trees, N tokens, n nodes of a level.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

OPERATORS = ("MIN", "MAX", "MED", "SM")
SYMBOLS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""By id, from 1 on; 0 is padding."""
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 1, 11, 15

NUM_TOKENS = 2048
LONGEST = 2000  # what is longer in a file is cut
BLOCK = 4096  # trees grown at a time


@dataclass(frozen=True)
class ListOpsSettings:
    """The trees that are kept: ``min_length < length < max_length``."""

    max_depth: int = 10
    max_args: int = 10
    p_operator: float = 0.25
    min_length: int = 500
    max_length: int = 2000


class Level(NamedTuple):
    """The nodes of one depth, tree by tree, in the order of their parents."""

    tree: Ints  # which tree each belongs to, [n]
    num_args: Ints  # 0 for a digit, [n]

    @property
    def first_arg(self) -> Ints:
        """The index in the next level of the first argument of each node, [n]."""
        return self.num_args.cumsum() - self.num_args


class Trees(NamedTuple):
    """Texts and their values."""

    tokens: NDArray[np.uint8]  # [T, N]
    values: NDArray[np.uint8]  # [T]


def make_trees(settings: ListOpsSettings, seed: int, chunk: int, num: int) -> Trees:
    """The trees of a chunk of the endless row of trees that the seed stands for."""
    rng = np.random.default_rng([seed, chunk])
    blocks: list[Trees] = []
    while sum(len(block.values) for block in blocks) < num:
        blocks.append(_written(rng, _grown(rng, settings)))
    tokens, values = (np.concatenate(each)[:num] for each in zip(*blocks, strict=True))
    return Trees(tokens, values)


def _grown(rng: np.random.Generator, settings: ListOpsSettings) -> list[Level]:
    """The shapes of the trees of a block that have a length to be kept.

    All roots are operators: a digit would be too short to be kept.
    """
    levels, length = [], np.zeros(BLOCK, dtype=np.int64)
    tree, p = np.arange(BLOCK), 1.0
    for depth in range(1, settings.max_depth + 1):
        is_operator = rng.random(len(tree)) < (p if depth < settings.max_depth else 0.0)
        num_args = np.where(is_operator, rng.integers(2, settings.max_args + 1, len(tree)), 0)
        length += np.bincount(tree, 1 + is_operator, minlength=BLOCK).astype(np.int64)
        num_args[length[tree] >= settings.max_length] = 0  # it will not be kept
        levels.append(Level(tree, num_args))
        tree, p = tree.repeat(num_args), settings.p_operator
    kept = (length > settings.min_length) & (length < settings.max_length)
    return [_only(level, kept) for level in levels]


def _only(level: Level, kept: NDArray[np.bool_]) -> Level:
    """The nodes of the trees that are kept, and these counted from 0 on."""
    number, here = kept.cumsum() - 1, kept[level.tree]
    return Level(number[level.tree[here]], level.num_args[here])


def _written(rng: np.random.Generator, levels: list[Level]) -> Trees:
    """Digits and operators for shapes, the text, and the value."""
    drawn = [rng.integers(10, size=len(level.tree)) for level in levels]
    operators = [rng.integers(len(OPERATORS), size=len(level.tree)) for level in levels]
    lengths, values = _lengths(levels), _values(levels, drawn, operators)
    tokens = np.zeros((len(levels[0].tree), NUM_TOKENS), dtype=np.uint8)
    start = np.zeros(len(levels[0].tree), dtype=np.int64)
    for depth, level in enumerate(levels):
        is_operator, end = level.num_args > 0, start + lengths[depth] - 1
        tokens[level.tree[is_operator], end[is_operator]] = CLOSE
        symbol = np.where(
            is_operator, FIRST_OPERATOR + operators[depth], FIRST_DIGIT + drawn[depth]
        )
        tokens[level.tree, start] = symbol
        if depth + 1 < len(levels):
            start = _starts(level, start, lengths[depth + 1])
    return Trees(tokens, values.astype(np.uint8))


def _lengths(levels: list[Level]) -> list[Ints]:
    """How many symbols each node is written with, by level."""
    lengths = [np.ones(len(level.tree), dtype=np.int64) for level in levels]
    for depth in reversed(range(len(levels) - 1)):
        upto = np.concatenate([[0], lengths[depth + 1].cumsum()])
        first, num_args = levels[depth].first_arg, levels[depth].num_args
        lengths[depth] += (num_args > 0) + upto[first + num_args] - upto[first]
    return lengths


def _starts(level: Level, start: Ints, lengths: Ints) -> Ints:
    """Where the arguments of the nodes begin, one after the other behind the operator."""
    before = np.concatenate([[0], lengths.cumsum()])[:-1]
    owner = np.arange(len(level.tree)).repeat(level.num_args)
    starts: Ints = start[owner] + 1 + before - before[level.first_arg[owner]]
    return starts


def _values(levels: list[Level], digits: list[Ints], operators: list[Ints]) -> Ints:
    """The values of the roots, from the deepest level up."""
    values = digits[-1]
    for depth in reversed(range(len(levels) - 1)):
        is_operator = levels[depth].num_args > 0
        above = digits[depth].copy()
        if is_operator.any():
            first, num_args = (
                each[is_operator] for each in (levels[depth].first_arg, levels[depth].num_args)
            )
            results = _results(values, first, num_args)
            above[is_operator] = results[operators[depth][is_operator], np.arange(len(first))]
        values = above
    return values


def _results(args: Ints, first: Ints, num_args: Ints) -> Ints:
    """What each operator makes of its arguments, in the order of ``OPERATORS``, [4, n].

    The median of an even number of digits is the mean of the middle two, rounded down.
    """
    owner = np.arange(len(first)).repeat(num_args)
    in_order = args[np.lexsort((args, owner))]
    low, high = in_order[first + (num_args - 1) // 2], in_order[first + num_args // 2]
    minimum, maximum = in_order[first], in_order[first + num_args - 1]
    return np.stack([minimum, maximum, (low + high) // 2, np.add.reduceat(args, first) % 10])
