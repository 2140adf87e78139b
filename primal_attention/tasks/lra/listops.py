"""ListOps: nested operations on digits, to be worked out from their text (Nangia & Bowman, 2018).

Trees are grown level by level, many at a time, with the distribution of the Long Range Arena: below
the greatest depth a node is an operator with probability 1/4, with 2 to 10 arguments, else a digit.
The length of a tree is its number of symbols: one a digit and two an operator, for its name and for
the bracket that closes it. Brackets that open and parentheses are no symbols of their own.

The original files are ``basic_train.tsv``, ``basic_val.tsv`` and ``basic_test.tsv`` with columns
``Source``, such as ``( ( ( [MAX 2 ) 9 ) ] )``, and ``Target``.

Letters: T trees, N tokens, n nodes of a level.
"""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from primal_attention.foreign_files import file_size, reading
from primal_attention.tasks.lra.chunks import InChunks
from primal_attention.tasks.lra.prepared import PartSizes, PreparedTask

Ints = NDArray[np.int64]

OPERATORS = ("MIN", "MAX", "MED", "SM")
SYMBOLS = (*"0123456789", *(f"[{name}" for name in OPERATORS), "]")
"""By id, from 1 on; 0 is padding."""
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 1, 11, 15

NUM_TOKENS = 2048
LONGEST = 2000  # what is longer in a file is cut
BLOCK = 4096  # trees grown at a time
FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
SIZES = PartSizes(96_000, 2_000, 2_000)
CHUNK = 1_000
MOST = 200_000  # trees of a file, of 2 KiB each; the largest of the arena has 96,000
IDS = {symbol: i for i, symbol in enumerate(SYMBOLS, start=1)} | {"X": len(SYMBOLS)}


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
    """Make the trees of a chunk of the endless row of trees that the seed stands for."""
    rng = np.random.default_rng([seed, chunk])
    blocks: list[Trees] = []
    while sum(len(block.values) for block in blocks) < num:
        blocks.append(_written(rng, _grown(rng, settings)))
    tokens, values = (np.concatenate(each)[:num] for each in zip(*blocks, strict=True))
    return Trees(tokens, values)


def _grown(rng: np.random.Generator, settings: ListOpsSettings) -> list[Level]:
    """Grow the shapes of a block of trees, and keep those of the right length.

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
    """Keep the nodes of some trees, and number these from 0 on."""
    number, here = kept.cumsum() - 1, kept[level.tree]
    return Level(number[level.tree[here]], level.num_args[here])


def _written(rng: np.random.Generator, levels: list[Level]) -> Trees:
    """Draw digits and operators for shapes; write the texts, compute the values."""
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
    """Count the symbols that each node is written with, by level."""
    lengths = [np.ones(len(level.tree), dtype=np.int64) for level in levels]
    for depth in reversed(range(len(levels) - 1)):
        upto = np.concatenate([[0], lengths[depth + 1].cumsum()])
        first, num_args = levels[depth].first_arg, levels[depth].num_args
        lengths[depth] += (num_args > 0) + upto[first + num_args] - upto[first]
    return lengths


def _starts(level: Level, start: Ints, lengths: Ints) -> Ints:
    """Place the arguments of the nodes, one after the other behind the operator."""
    before = np.concatenate([[0], lengths.cumsum()])[:-1]
    owner = np.arange(len(level.tree)).repeat(level.num_args)
    starts: Ints = start[owner] + 1 + before - before[level.first_arg[owner]]
    return starts


def _values(levels: list[Level], digits: list[Ints], operators: list[Ints]) -> Ints:
    """Compute the values of the roots, from the deepest level up."""
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
    """Apply each operator to its arguments, in the order of ``OPERATORS``, [4, n].

    The median of an even number of digits is the mean of the middle two, rounded down.
    """
    owner = np.arange(len(first)).repeat(num_args)
    in_order = args[np.lexsort((args, owner))]
    low, high = in_order[first + (num_args - 1) // 2], in_order[first + num_args // 2]
    minimum, maximum = in_order[first], in_order[first + num_args - 1]
    return np.stack([minimum, maximum, (low + high) // 2, np.add.reduceat(args, first) % 10])


def generate_listops(
    in_chunks: InChunks, *, sizes: PartSizes = SIZES, seed: int = 0
) -> PreparedTask:
    """Generate trees.

    Args:
        in_chunks: Runs the work; see ``made_in_chunks``.
        sizes: Of the parts.
        seed: Of the trees.
    """
    settings = ListOpsSettings()
    make = partial(make_trees, settings, seed, num=CHUNK)
    tokens, values = in_chunks(make, sum(sizes), CHUNK)
    facts = {"made by": "generate_listops", "seed": seed, "settings": asdict(settings)}
    return PreparedTask("listops", sizes, tokens, values, facts=facts)


def read_listops(folder: Path) -> PreparedTask:
    """Read the trees of the three original files."""
    parts = [_read_tsv(folder / name) for name in FILES]
    tokens, values = (np.concatenate(each) for each in zip(*parts, strict=True))
    sizes = PartSizes(*(len(part.values) for part in parts))
    return PreparedTask("listops", sizes, tokens, values, facts={"read from": list(FILES)})


def _read_tsv(path: Path) -> Trees:
    """Read the trees of one file; what is longer than 2,000 symbols is cut."""
    rows: list[NDArray[np.uint8]] = []
    values: list[int] = []
    file_size(path)
    with (
        reading(path, "a file of ListOps", "get the whole file anew"),
        path.open(encoding="utf-8") as file,
    ):
        if (head := file.readline(100).split()) != ["Source", "Target"]:
            raise ValueError(f"the first line must be Source, Target, got {head[:5]}")
        for number, line in enumerate(file, start=2):
            if len(rows) == MOST:
                raise ValueError(f"it has more than {MOST} trees")
            columns = line.rstrip("\r\n").split("\t")
            if len(columns) != 2:
                raise ValueError(f"line {number} has {len(columns)} columns, not Source and Target")
            rows.append(_tokens(columns[0], number))
            if columns[1] not in tuple("0123456789"):
                raise ValueError(f"line {number}: Target must be a digit, got {columns[1][:20]!r}")
            values.append(int(columns[1]))
        if not rows:
            raise ValueError("it has no tree")
    return Trees(np.stack(rows), np.array(values, dtype=np.uint8))


def _tokens(source: str, line: int) -> NDArray[np.uint8]:
    """Encode a text, padded."""
    symbols = source.replace("(", " ").replace(")", " ").split(maxsplit=LONGEST)[:LONGEST]
    if unknown := [symbol for symbol in symbols if symbol not in IDS]:
        raise ValueError(f"line {line} has {unknown[0][:20]!r}, which is no symbol of ListOps")
    ids = [IDS[symbol] for symbol in symbols]
    return np.array(ids + [0] * (NUM_TOKENS - len(ids)), dtype=np.uint8)
