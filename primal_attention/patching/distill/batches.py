"""Batches of model inputs: some to measure with, the others repeated as long as they are wanted."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, cycle, islice, repeat
from typing import Any

Batch = Mapping[str, Any]
Batches = Iterable[Batch]

_NUM_VALID = 4


def split(batches: Batches, valid: Batches | None) -> tuple[list[Batch], Iterator[Batch]]:
    """Return the batches to measure with, and those to learn from, over and over.

    Without ``valid`` the first four are set aside. Batches of an iterator, which can be read only
    once, are kept.
    """
    number = _NUM_VALID if valid is None else 0
    reader = _read("batches", batches)
    held_out = list(islice(reader, number) if valid is None else _read("valid", valid))
    first = next(reader, None)
    if first is None:
        raise ValueError(
            f"batches has {len(held_out) if number else 0} batches, of which {number} would be set "
            "aside to measure with; give more, or pass valid="
        )
    if not held_out:
        raise ValueError("valid has no batch")
    rest = chain([first], reader)
    if isinstance(batches, Iterator):
        return held_out, cycle(rest)
    again = (islice(_read("batches", batches), number, None) for _ in repeat(None))
    return held_out, chain(rest, chain.from_iterable(again))


def _read(name: str, batches: Batches) -> Iterator[Batch]:
    if not isinstance(batches, Iterable):
        raise ValueError(f"{name} must be an iterable of batches, got {type(batches).__name__}")
    for batch in batches:
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"{name} must give mappings from the names of model inputs to tensors, got a "
                f"{type(batch).__name__}"
            )
        yield batch
