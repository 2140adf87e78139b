"""Texts as bytes: the id of a byte is its value plus one, 0 is padding."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_TOKENS = 4096
LONGEST = 4000  # what is longer is cut


def byte_tokens(texts: Sequence[bytes]) -> NDArray[np.uint8]:
    """Ids [texts, 4096] of the first 4,000 bytes of each text.

    UTF-8 has no byte 255, so that all ids fit into a byte.
    """
    tokens = np.zeros((len(texts), NUM_TOKENS), dtype=np.uint8)
    for row, text in zip(tokens, texts, strict=True):
        values = np.frombuffer(text[:LONGEST], dtype=np.uint8)
        row[: len(values)] = values + 1
        if (values == 255).any():
            raise ValueError(f"a text that begins with {text[:40]!r} is not UTF-8: it has byte 255")
    return tokens
