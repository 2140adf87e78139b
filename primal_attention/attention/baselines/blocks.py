"""Exact attention to few keys: blocks of queries, each with the keys that some of them see.

Letters: B batch, N tokens, H heads, C head dim, n blocks, l queries in a block, m keys of a block.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.attention.baselines.softmax import (
    CachedAttention,
    KeyValueCache,
    dot_product_attention,
)


class KeyBlocks(NamedTuple):
    """The keys and values of each block, and which of them its queries see."""

    k: Tensor  # [B, n, m, H, C]
    v: Tensor  # [B, n, m, H, C]
    seen: Tensor  # bool [B, n, l, m]


class Reach(NamedTuple):
    """The numbers of tokens that a window reaches before and after its own."""

    before: int
    after: int


class PatternAttention(CachedAttention):
    """A mechanism in which places among the real tokens tell which keys a query sees."""

    @abstractmethod
    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Tell whether the query at place i sees the key at place j <= i of a causal layer."""

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache, mask: Tensor | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Attend to the cache and to the new tokens; N x T scores unless the cache is empty."""
        N, starts = q.shape[1], state.k.shape[1] == 0
        state = state.append(k, v, mask)
        if starts:
            return self.attend(q, k, v, mask, mask), state
        keys, values, real = state.read(q.dtype)
        place = real.cumsum(1) - 1
        i, j = place[:, -N:, None], place[:, None]
        seen = self.sees(i, j) & (j <= i) & real[:, None]  # [B, N, T]
        source = KeyBlocks(keys[:, None], values[:, None], seen[:, None])
        return attend_blocks(q[:, None], source), state


def into_blocks(x: Tensor, length: int) -> Tensor:
    """Split tokens [B, N, ...] into blocks [B, n, length, ...], padded with zeros (False)."""
    B, N, *rest = x.shape
    num_blocks = (N + length - 1) // length
    return _padded(x, 0, num_blocks * length - N).reshape(B, num_blocks, length, *rest)


def windows(k: Tensor, v: Tensor, real: Tensor, length: int, reach: Reach) -> KeyBlocks:
    """Return the keys [B, N, H, C] within reach of each query, for blocks of ``length`` queries."""
    size = reach.before + length + reach.after
    missing = -k.shape[1] % length + reach.after
    k, v, real = (_padded(x, reach.before, missing).unfold(1, size, length) for x in (k, v, real))
    query = torch.arange(length, device=real.device)[:, None]
    ahead = torch.arange(size, device=real.device) - query  # of the first key within reach
    inside = (ahead >= 0) & (ahead <= reach.before + reach.after)  # [l, m]
    return KeyBlocks(k.movedim(-1, 2), v.movedim(-1, 2), real[:, :, None] & inside)


def with_common(source: KeyBlocks, k: Tensor, v: Tensor, seen: Tensor) -> KeyBlocks:
    """Append keys and values [B, G, H, C] that all blocks share to the source."""
    n = source.k.shape[1]
    k, v = (z[:, None].expand(-1, n, -1, -1, -1) for z in (k, v))
    return KeyBlocks(
        torch.cat([source.k, k], dim=2),
        torch.cat([source.v, v], dim=2),
        torch.cat([source.seen, seen], dim=3),
    )


def attend_blocks(q: Tensor, source: KeyBlocks) -> Tensor:
    """Compute outputs [B, n l, H, C] of queries [B, n, l, H, C], through SDPA.

    A query that sees no key gets the mean of all values of its block.
    """
    B, n, l, H, C = q.shape
    q, k, v = (z.flatten(0, 1).transpose(1, 2) for z in (q, source.k, source.v))
    seen = source.seen.flatten(0, 1)[:, None]  # [B n, 1, l, m]
    seen = seen | ~seen.any(-1, keepdim=True)
    out = dot_product_attention(q, k, v, seen)
    return out.transpose(1, 2).reshape(B, n * l, H, C)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 2) + [before, after])
