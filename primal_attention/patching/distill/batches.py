"""Batches of model inputs as they come, as many as are wanted."""

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
        if not callable(batches) and not isinstance(batches, Iterable):
            raise ValueError(
                f"{name} must be batches of model inputs (mappings), or a function that gives "
                f"them, got {type(batches).__name__}"
            )
        self._batches = batches
        self._iterator = iter(()) if callable(batches) else iter(batches)
        self._kept: list[Batch] = []
        self._first = 0
        self._endless = self._again()

    def once(self) -> list[Batch]:
        """All of them, one time."""
        return list(self._pass())

    def set_aside(self, number: int) -> list[Batch]:
        """Take the first ones and never give them again."""
        taken = list(islice(self._pass(), number + 1))
        if len(taken) <= number:
            raise ValueError(
                f"{self.name} has {len(taken)} batches, of which {number} would be set aside to "
                "measure with; give more, or pass valid="
            )
        self._first = number
        self._endless = self._again()
        return taken[:number]

    def take(self, number: int) -> Iterator[Batch]:
        """The next ones."""
        return islice(self._endless, number)

    def _again(self) -> Iterator[Batch]:
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

    def _source(self) -> Iterable[Batch]:
        if callable(self._batches):
            return self._batches()
        return self._kept_and_new() if self._iterator is self._batches else self._batches

    def _kept_and_new(self) -> Iterator[Batch]:
        for place in count():
            if place == len(self._kept):
                new = next(self._iterator, None)
                if new is None:
                    return
                self._kept.append(new)
            yield self._kept[place]
