"""Sequences whose tokens are sharded over processes: the seam that a module offers for it."""

from typing import Any

from torch import nn


class Sharded(nn.Module):
    """A module that can work on a shard of the tokens of each sequence.

    ``distributed.shard_context`` sets ``shard``, which the module asks for all that depends on the
    tokens of other processes: counts, positions, sums, states, landmarks.
    """

    shard: Any = None  # a distributed.ContextShard; None where sequences are whole

    def needs_whole(self) -> str | None:
        """Say why sequences cannot be sharded; None where they can."""
        return None

    def check_whole(self, use: str) -> None:
        """Raise where sequences are sharded, for a use that needs whole ones."""
        if self.shard is not None:
            raise ValueError(
                f"{use} needs whole sequences, and those of this layer are sharded over "
                f"{self.shard.size} processes; shard_context(model, None) undoes that"
            )
