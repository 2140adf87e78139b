"""The rotary positions of the pass that runs, which belong to its thread and to no module.

Letters: B batch, N tokens, C head dim.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines [B or 1, N, C] of the positions, as the host passes them."""

_running = threading.local()


@contextmanager
def rotated(rotation: Rotation | None) -> Iterator[None]:
    """Rotate what the projections give while the block runs, in this thread alone.

    The mechanism calls its projections with tokens and nothing else, so the rotation of a pass
    reaches them beside it. A context variable would do the same, but cannot be compiled.
    """
    _running.rotation = rotation
    try:
        yield
    finally:
        _running.rotation = None


def running_rotation() -> Rotation | None:
    """The rotation of the pass that runs in this thread."""
    return getattr(_running, "rotation", None)
