"""The Long Range Arena (Tay et al., 2021) as classification tasks on sequences of symbols.

Letters: B cases, N tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from primal_attention.foreign_files import reading
from primal_attention.tasks.lra.cifar import CLASSES
from primal_attention.tasks.lra.pathfinder import PATHFINDERS
from primal_attention.tasks.lra.prepared import PreparedTask
from primal_attention.tasks.lra.sets import find_lra, load_lra
from primal_attention.tasks.splits import stratified_split
from primal_attention.tasks.task import CLASSIFICATION, Cases, Sizes, Task

LABELS: dict[str, tuple[str, ...]] = {
    "listops": tuple("0123456789"),
    "text": ("neg", "pos"),
    "retrieval": ("unrelated", "cites"),
    "retrieval-imdb": ("different films", "same film"),
    "image": CLASSES,
    **dict.fromkeys(PATHFINDERS, ("apart", "connected")),
}
IMAGES = {"image", *PATHFINDERS}
VOCAB_SIZE = 512  # more than there are symbols, as in the released code
LISTOPS_VOCAB_SIZE = 32
HELD_OUT = 0.1  # of the training cases of Text


@dataclass(frozen=True)
class LraProtocol:
    """How cases are read; the last line is for the model to follow.

    Attributes:
        zero_is_padding: A token 0 is masked whatever it is. In Image and Pathfinder it is a black
            pixel, so most of a Pathfinder image is masked. Otherwise images have no mask.
        text_validates_on_test: Text is selected on its test cases; otherwise on a stratified tenth
            of the training cases, which is held out. Every other task has cases of its own.
        pool_over_padding: The mean over the outputs of a sequence divides their sum, zero at
            padding, by the padded length; otherwise by the number of real tokens.
    """

    zero_is_padding: bool
    text_validates_on_test: bool
    pool_over_padding: bool


LRA_PROTOCOLS: dict[str, LraProtocol] = {
    "paper": LraProtocol(zero_is_padding=True, text_validates_on_test=True, pool_over_padding=True),
    "clean": LraProtocol(
        zero_is_padding=False, text_validates_on_test=False, pool_over_padding=False
    ),
}
"""``paper``: as released by the authors and by Nyströmformer before them."""


def lra_task(
    name: str, *, folder: Path | None = None, protocol: str = "paper", seed: int = 0
) -> Task:
    """Make a task of the arena; its tokens are uint8, as many as a padded sequence has.

    A model is called with ``x`` [B, N] and ``token_mask`` [B, N]; for pairs with ``a``, ``b``,
    ``mask_a`` and ``mask_b``. Under the clean protocol images come without a mask.

    Args:
        name: One of ``LRA_TASKS``.
        folder: Of the data, see ``load_lra``.
        protocol: One of ``LRA_PROTOCOLS``, which says what is masked and where to select.
        seed: Of the training cases of Text that the clean protocol holds out.
    """
    if protocol not in LRA_PROTOCOLS:
        known = ", ".join(LRA_PROTOCOLS)
        raise ValueError(f"protocol must be one of {known}, got {protocol!r}")
    rules, prepared = LRA_PROTOCOLS[protocol], load_lra(name, folder)
    vocab_size = LISTOPS_VOCAB_SIZE if name == "listops" else VOCAB_SIZE
    with reading(str(find_lra(name, folder)), f"a file of {name!r}", "make or get it anew"):
        _check_symbols(prepared, len(LABELS[name]), vocab_size)
    ends = np.cumsum(prepared.sizes)
    train, valid, test = np.split(np.arange(ends[-1]), ends[:-1])
    if not len(valid) and rules.text_validates_on_test:
        valid = test
    elif not len(valid):
        split = stratified_split(prepared.targets[train], HELD_OUT, seed)
        train, valid = train[split.kept], train[split.held_out]
    test_cases = _cases(prepared, test, rules)
    return Task(
        f"lra/{name}",
        CLASSIFICATION,
        Sizes(prepared.tokens.shape[1], len(LABELS[name]), vocab_size=vocab_size),
        train=_cases(prepared, train, rules),
        valid=test_cases if valid is test else _cases(prepared, valid, rules),
        test=test_cases,
        labels=LABELS[name],
    )


def _check_symbols(prepared: PreparedTask, num_classes: int, vocab_size: int) -> None:
    """Raise where a token or target is none of the task's, or train or test is empty."""
    if not (prepared.sizes.train and prepared.sizes.test and prepared.tokens.shape[1]):
        raise ValueError(f"its parts have {list(prepared.sizes)} cases")
    if (found := prepared.targets.max()) >= num_classes:
        raise ValueError(f"its targets go up to {found}, there are {num_classes} classes")
    # a byte fits into a larger vocabulary, and the largest tasks take long to look through
    if vocab_size < 256 and (found := prepared.tokens.max()) >= vocab_size:
        raise ValueError(f"its tokens go up to {found}, there are {vocab_size} symbols")


def _cases(prepared: PreparedTask, indices: NDArray[np.int64], rules: LraProtocol) -> Cases:
    target = torch.from_numpy(prepared.targets[indices].astype(np.int64))
    has_mask = rules.zero_is_padding or prepared.task not in IMAGES
    if prepared.pairs is None:
        return Cases(_sequence(prepared, indices, "x", "token_mask", has_mask), target)
    one, other = prepared.pairs[indices].T
    return Cases(
        _sequence(prepared, one, "a", "mask_a", has_mask)
        | _sequence(prepared, other, "b", "mask_b", has_mask),
        target,
    )


def _sequence(
    prepared: PreparedTask, rows: NDArray[np.integer], name: str, mask: str, has_mask: bool
) -> dict[str, Tensor]:
    chosen: slice | NDArray[np.integer] = rows
    if len(rows) and (np.diff(rows) == 1).all():  # a slice copies nothing of a mapped file
        chosen = slice(int(rows[0]), int(rows[-1]) + 1)
    tokens = torch.from_numpy(np.asarray(prepared.tokens)[chosen])
    return {name: tokens, mask: tokens != 0} if has_mask else {name: tokens}
