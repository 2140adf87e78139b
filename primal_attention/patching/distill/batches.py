"""Batches of model inputs in the order they come, repeated as long as they are wanted."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count, islice
from typing import Any

Batch = Mapping[str, Any]
Batches = Iterable[Batch] | Callable[[], Iterable[Batch]]


class BatchStream:
    """Goes through batches over and over; what can be read only once is kept.

    Args:
        name: The argument they were given as, for messages.
        batches: Mappings from names to inputs, or a function that gives them anew.
    """

    def __init__(self, name: str, batches: Batches):
        self.name = name
        self._first = 0
        if callable(batches):
            self._source = batches
        elif isinstance(batches, Iterable):
            once = iter(batches)
            self._source = _keeping(once) if once is batches else lambda: batches
        else:
            raise ValueError(
                f"{name} must be batches of model inputs (mappings), or a function that gives "
                f"them, got {type(batches).__name__}"
            )
        self._endless = self._repeat()

    def once(self) -> list[Batch]:
        """Read all of them, one time."""
        found = list(self._pass())
        if not found:
            raise ValueError(f"{self.name} has no batch")
        return found

    def set_aside(self, number: int) -> list[Batch]:
        """Take the first ones and never give them again."""
        taken = list(islice(self._pass(), number + 1))
        if len(taken) <= number:
            raise ValueError(
                f"{self.name} has {len(taken)} batches, of which {number} would be set aside to "
                "measure with; give more, or pass valid="
            )
        self._first = number
        self._endless = self._repeat()
        return taken[:number]

    def take(self, number: int) -> Iterator[Batch]:
        """Give the next ones."""
        return islice(self._endless, number)

    def _repeat(self) -> Iterator[Batch]:
        while True:
            rest = islice(self._pass(), self._first, None)
            first = next(rest, None)
            if first is None:
                raise ValueError(f"{self.name} has no batch")
            yield first
            yield from rest

    def _pass(self) -> Iterator[Batch]:
        for batch in self._source():
            if not isinstance(batch, Mapping):
                raise ValueError(
                    f"{self.name} must give mappings from the names of model inputs to tensors, "
                    f"got a {type(batch).__name__}"
                )
            yield batch


def _keeping(batches: Iterator[Batch]) -> Callable[[], Iterator[Batch]]:
    """Replay an iterator: each pass reads what earlier ones have read, then goes on."""
    kept: list[Batch] = []

    def replay() -> Iterator[Batch]:
        for place in count():
            if place == len(kept):
                kept.extend(islice(batches, 1))
            if place == len(kept):
                return
            yield kept[place]

    return replay
