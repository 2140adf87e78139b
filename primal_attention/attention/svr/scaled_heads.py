"""Heads that see their keys at different scales: the frame of Attention-SH.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, r tokens of a pooled one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.softmax import softmax_attention
from primal_attention.attention.svr.batch_norm import (
    KeyMoments,
    KeyNorm,
    key_moments,
    running_key_moments,
)
from primal_attention.attention.svr.pooled_past import attend_past
from primal_attention.attention.svr.pooling import Source, TokenPooling

Attend = Callable[[Tensor, Source, list[int]], Tensor]
"""Outputs of queries [B, N, h, C] over their source; the list says which heads these are."""


class HeadGroup(NamedTuple):
    """The heads of one scale."""

    scale: int
    heads: list[int]

    def of(self, z: Tensor) -> Tensor:
        """The heads of the group in z [B, N, H, C]; a view where they are neighbours."""
        first, count = self.heads[0], len(self.heads)
        if self.heads == list(range(first, first + count)):
            return z[:, :, first : first + count]
        return torch.cat([z[:, :, head : head + 1] for head in self.heads], dim=2)


def default_scales(num_heads: int) -> list[int]:
    """1, 2, 4 and 8 tokens in equal shares of the heads: 1, 1, 2, 2, 4, 4, 8, 8 for eight."""
    return [2 ** (head * min(num_heads, 4) // num_heads) for head in range(num_heads)]


def head_groups(num_heads: int, scales: Sequence[int] | None) -> list[HeadGroup]:
    """The heads grouped by their scales, the smallest first."""
    scales = default_scales(num_heads) if scales is None else list(scales)
    if len(scales) != num_heads:
        raise ValueError(f"scales must have one entry for each of {num_heads} heads, got {scales}")
    check_sizes(**{f"scales[{head}]": scale for head, scale in enumerate(scales)})
    return [
        HeadGroup(scale, [head for head, its in enumerate(scales) if its == scale])
        for scale in sorted(set(scales))
    ]


@dataclass(frozen=True)
class ScaledHeads:
    """Attention with one call for each scale; with a norm, Attention-BN on pooled keys."""

    groups: list[HeadGroup]
    pooling: TokenPooling

    @property
    def scales(self) -> list[int]:
        """The scale of each head."""
        of_head = {head: group.scale for group in self.groups for head in group.heads}
        return [of_head[head] for head in sorted(of_head)]

    def attend(
        self, q: Tensor, mask: Tensor | None, source: Source, norm: KeyNorm | None
    ) -> Tensor:
        """Softmax attention [B, N, H, C], with a norm of queries folded by their pooled keys."""

        def softmax(queries: Tensor, source: Source, heads: list[int]) -> Tensor:
            if norm is not None:
                queries = norm(queries, key_moments(source.k, source.mask), heads)
            return softmax_attention(queries, *source, mask=mask)

        return self.each(q, source, softmax)

    def each(self, q: Tensor, source: Source, attend: Attend) -> Tensor:
        """Outputs [B, N, H, C], scale by scale; sequences are pooled over their real tokens."""
        self.pooling.check_length(source.k.shape[1])
        if len(self.groups) == 1 and self.groups[0].scale == 1:
            return attend(q, source, self.groups[0].heads)
        packed = source
        if self.pooling.grid is None and source.mask is not None:
            order = token_order(source.k, source.mask)
            packed = Source(order.pack(source.k), order.pack(source.v), order.real())
        outputs = []
        for group in self.groups:
            whole = source if group.scale == 1 else packed
            mine = Source(group.of(whole.k), group.of(whole.v), whole.mask)
            if group.scale > 1:
                mine = self.pooling(mine, group.scale)
            outputs.append(attend(group.of(q), mine, group.heads))
        return self._join(outputs)

    def attend_causal(
        self,
        q: Tensor,
        mask: Tensor | None,
        source: Source,
        norm: KeyNorm | None,
    ) -> Tensor:
        """Outputs [B, N, H, C] of the last N tokens of the source; the mask is theirs.

        Packed, the real tokens stand before all padding, so no query of theirs sees any.
        """
        k, v, source_mask = source
        N, T = q.shape[1], k.shape[1]
        order, source_order = token_order(q, mask), token_order(k, source_mask)
        before = None if N == T else source_order.num_real - order.num_real
        packed = order.pack(q), source_order.pack(k), source_order.pack(v)
        outputs = []
        for group in self.groups:
            if group.scale == 1:
                mine = Source(group.of(k), group.of(v), source_mask)
                outputs.append(_attend_all(group.of(q), mine, norm, group.heads))
            else:
                out = attend_past(
                    *(group.of(z) for z in packed),
                    num_before=before,
                    scale=group.scale,
                    pool=self.pooling.pool,
                    fold=None if norm is None else partial(norm, heads=group.heads),
                )
                outputs.append(order.unpack(out))
        return self._join(outputs)

    def _join(self, outputs: list[Tensor]) -> Tensor:
        heads = [head for group in self.groups for head in group.heads]
        joined = torch.cat(outputs, dim=2)
        if heads == sorted(heads):
            return joined
        return HeadGroup(0, [heads.index(head) for head in range(len(heads))]).of(joined)


def _attend_all(q: Tensor, source: Source, norm: KeyNorm | None, heads: list[int]) -> Tensor:
    """Causal attention of the last N tokens without pooling."""
    if norm is not None:
        moments = running_key_moments(source.k, source.mask)
        latest = KeyMoments(*(moment[:, -q.shape[1] :] for moment in moments))
        q = norm(q, latest, heads)
    return softmax_attention(q, *source, causal=True)
