r"""Heads that see their keys at different scales: the attention of Attention-SH.

Neighbouring keys and values are pooled into one: a smaller training set for the regression of a
head. In the causal form (ours) the tokens are cut into blocks of r. Query i sees one pooled key for
each block that is complete by then, $(b + 1)\, r - 1 \le i$, and the tokens after the last
complete block one by one, up to itself: every token up to i counts once; cost N (N / r + r).

Letters: B batch, N queries, T source tokens, H heads, C head dim, r tokens of a pooled one,
M pooled tokens, n blocks, w tokens of a window.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum
from torch import Tensor

from primal_attention.attention.base.compaction import take, token_order
from primal_attention.attention.base.validation import check_choice, check_sizes
from primal_attention.attention.baselines.blocks import into_blocks
from primal_attention.attention.baselines.softmax import softmax_attention
from primal_attention.attention.svr import key_norm
from primal_attention.precision import accumulate, accumulation_dtype, exact


class KeysAndValues(NamedTuple):
    """Keys and values, and which of them are real; None where all are."""

    k: Tensor  # [B, T, H, C]
    v: Tensor  # [B, T, H, C]
    mask: Tensor | None  # [B, T]


def average(z: Tensor, real: Tensor | None) -> Tensor:
    """Mean [B, M, H, C] of the real tokens of each window of z [B, M, w, H, C]."""
    if real is None:
        return z.mean(2)
    real = real[..., None, None]
    total = torch.where(real, z, 0.0).sum(2, dtype=accumulation_dtype(z.dtype))
    return (total / real.sum(2).clamp(min=1)).to(z.dtype)


def largest(z: Tensor, real: Tensor | None) -> Tensor:
    """Maximum of each feature over the real tokens; 0 where there is none."""
    if real is None:
        return z.amax(2)
    real = real[..., None, None]
    lowest = torch.finfo(z.dtype).min
    return torch.where(real.any(2), torch.where(real, z, lowest).amax(2), 0.0)


def first(z: Tensor, real: Tensor | None) -> Tensor:
    """Return the first real token of each window: down-sampling with a stride."""
    if real is None:
        return z[:, :, 0]
    index = real.int().argmax(2)[:, :, None, None, None]
    return z.gather(2, index.expand(z.shape[0], -1, -1, *z.shape[3:]))[:, :, 0]


POOLS: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "average": average,
    "max": largest,
    "stride": first,
}


@dataclass(frozen=True)
class TokenPooling:
    """Pool neighbours, of a sequence or of a grid.

    Attributes:
        pool: ``average``, ``max`` or ``stride``, see :data:`POOLS`.
        grid: Rows and columns of the tokens of an image; None for a sequence.
        num_prefix_tokens: How many tokens at the front are kept as they are (a class token).
    """

    pool: str = "average"
    grid: tuple[int, int] | None = None
    num_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        check_choice("pool", self.pool, POOLS)
        if self.grid is not None:
            if len(self.grid) != 2:
                raise ValueError(f"grid must be a pair (rows, columns), got {self.grid!r}")
            check_sizes(**{f"grid[{i}]": size for i, size in enumerate(self.grid)})
        prefix = self.num_prefix_tokens
        if not isinstance(prefix, int) or prefix < 0:
            raise ValueError(f"num_prefix_tokens must be an integer of at least 0, got {prefix!r}")

    def check_length(self, length: int) -> None:
        """Raise unless so many tokens fill the grid."""
        if self.grid is None:
            return
        expected = self.num_prefix_tokens + math.prod(self.grid)
        if length != expected:
            raise ValueError(
                f"grid={self.grid} with num_prefix_tokens={self.num_prefix_tokens} needs "
                f"{expected} keys, got {length}"
            )

    def __call__(self, source: KeysAndValues, scale: int) -> KeysAndValues:
        """One key and value for each window of ``scale`` tokens; real where any token of it is.

        Real tokens must stand at the front. A last window that is not full pools its tokens.
        """
        k, v, mask = source
        P = self.num_prefix_tokens
        grid = self.grid or (1, max(k.shape[1] - P, 0))
        window = window_shape(scale) if self.grid else (1, scale)
        real = None if mask is None else windows(mask[:, P:], grid, window)
        full = mask is None and _divides(window, grid)
        if real is None and not full:
            real = windows(torch.ones_like(k[:1, P:, 0, 0], dtype=torch.bool), grid, window)
        pool = POOLS[self.pool]
        k, v = (
            torch.cat([z[:, :P], pool(windows(z[:, P:], grid, window), real)], dim=1)
            for z in (k, v)
        )
        if mask is None or real is None:
            return KeysAndValues(k, v, None)
        return KeysAndValues(k, v, torch.cat([mask[:, :P], real.any(2)], dim=1))


_POOLING = TokenPooling()


def _divides(window: tuple[int, int], grid: tuple[int, int]) -> bool:
    """Return whether every window is full; False if an export leaves the length open."""
    sizes_known = all(isinstance(size, int) for size in grid)
    return sizes_known and not any(map(operator.mod, grid, window))


def window_shape(scale: int) -> tuple[int, int]:
    """Sides of the most nearly square window of ``scale`` tokens, the shorter first."""
    shorter = next(side for side in range(math.isqrt(scale), 0, -1) if scale % side == 0)
    return shorter, scale // shorter


def windows(z: Tensor, grid: tuple[int, int], window: tuple[int, int]) -> Tensor:
    """Split tokens [B, T, ...] of a grid into windows [B, M, w, ...], padded with zeros (False)."""
    (rows, columns), (height, width) = grid, window
    y, x = (rows + height - 1) // height, (columns + width - 1) // width
    B, rest = z.shape[0], z.shape[2:]
    z = z.reshape(B, rows, columns, *rest)
    z = F.pad(z, [0, 0] * len(rest) + [0, x * width - columns, 0, y * height - rows])
    z = z.reshape(B, y, height, x, width, *rest).transpose(2, 3)
    return z.reshape(B, y * x, height * width, *rest)


Attend = Callable[[Tensor, KeysAndValues, list[int]], Tensor]
"""Outputs of queries [B, N, h, C] over their source; the list says which heads these are."""


class HeadGroup(NamedTuple):
    """The heads of one scale."""

    scale: int
    heads: list[int]

    def of(self, z: Tensor) -> Tensor:
        """Select the heads of the group in z [B, N, H, C]; a view where they are neighbours."""
        first, count = self.heads[0], len(self.heads)
        if self.heads == list(range(first, first + count)):
            return z[:, :, first : first + count]
        return torch.cat([z[:, :, head : head + 1] for head in self.heads], dim=2)


def default_scales(num_heads: int) -> list[int]:
    """1, 2, 4 and 8 tokens in equal shares of the heads: 1, 1, 2, 2, 4, 4, 8, 8 for eight."""
    return [2 ** (head * min(num_heads, 4) // num_heads) for head in range(num_heads)]


@dataclass(frozen=True)
class ScaledHeads:
    """Attention with one call for each scale; with a norm, Attention-BN on pooled keys."""

    scales: list[int]  # of each head
    groups: list[HeadGroup] = field(repr=False)  # of equal scales, the smallest first
    pooling: TokenPooling

    @classmethod
    def of(
        cls, num_heads: int, scales: Sequence[int], pooling: TokenPooling = _POOLING
    ) -> ScaledHeads:
        """Group the heads by their scales."""
        scales = list(scales)
        if len(scales) != num_heads:
            raise ValueError(
                f"scales must have one entry for each of {num_heads} heads, got {scales}"
            )
        check_sizes(**{f"scales[{head}]": scale for head, scale in enumerate(scales)})
        groups = [
            HeadGroup(scale, [head for head, its in enumerate(scales) if its == scale])
            for scale in sorted(set(scales))
        ]
        return cls(scales, groups, pooling)

    def each(self, q: Tensor, source: KeysAndValues, attend: Attend) -> Tensor:
        """Compute outputs [B, N, H, C] by scale; sequences are pooled over their real tokens."""
        self.pooling.check_length(source.k.shape[1])
        if len(self.groups) == 1 and self.groups[0].scale == 1:
            return attend(q, source, self.groups[0].heads)
        packed = source
        if self.pooling.grid is None and source.mask is not None:
            order = token_order(source.k, source.mask)
            packed = KeysAndValues(order.pack(source.k), order.pack(source.v), order.real())
        outputs = []
        for group in self.groups:
            whole = source if group.scale == 1 else packed
            mine = KeysAndValues(group.of(whole.k), group.of(whole.v), whole.mask)
            if group.scale > 1:
                mine = self.pooling(mine, group.scale)
            outputs.append(attend(group.of(q), mine, group.heads))
        return self._join(outputs)

    def attend_causal(
        self, q: Tensor, mask: Tensor | None, source: KeysAndValues, norm: key_norm.KeyNorm | None
    ) -> Tensor:
        """Compute outputs [B, N, H, C] of the last N tokens of the source, with their mask.

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
                mine = KeysAndValues(group.of(k), group.of(v), source_mask)
                outputs.append(
                    attend_normed(group.of(q), mine, group.heads, norm=norm, causal=True)
                )
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


def attend_normed(
    q: Tensor,
    source: KeysAndValues,
    heads: list[int] | None = None,
    *,
    norm: key_norm.KeyNorm | None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Softmax attention, causal that of the last tokens, normalised by the keys that each sees."""
    if norm is not None:
        running = causal and q.shape[1] > 1
        moments = (key_norm.running_key_moments if running else key_norm.key_moments)(
            source.k, source.mask
        )
        if running and q.shape[1] != source.k.shape[1]:
            moments = moments.last(q.shape[1])
        q = norm(q, moments, heads)
    return softmax_attention(q, *source, mask=mask, causal=causal)


@exact
def attend_past(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, T, H, C], no padding before a real token
    v: Tensor,  # [B, T, H, C]
    *,
    num_before: Tensor | None,  # [B], how many tokens precede the first query; None for 0
    scale: int,
    pool: str,
    fold: Callable[[Tensor, key_norm.KeyMoments], Tensor] | None = None,
) -> Tensor:
    """Compute outputs [B, N, H, C]; ``fold`` makes Attention-BN of it, by moments of seen keys."""
    whole = accumulate(q), accumulate(k), accumulate(v)
    token, queries, keys, values = _blocks(*whole, num_before, scale)
    k_pooled, v_pooled = (POOLS[pool](into_blocks(accumulate(z), scale), None) for z in (k, v))
    num_complete = (token + 1) // scale
    if fold is not None:
        folded = fold(queries.flatten(1, 2), _moments_seen(keys, k_pooled, num_complete))
        queries = folded.view_as(queries)
    queries = queries * q.shape[-1] ** -0.5
    past = torch.arange(k_pooled.shape[1], device=q.device) < num_complete[..., None]
    of_past = einsum(queries, k_pooled, "b n r h c, b m h c -> b h n r m")
    of_block = einsum(queries, keys, "b n r h c, b n m h c -> b h n r m")
    scores = [_hide(of_past, past[:, None]), _hide(of_block, _seen_in_block(scale, q.device))]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = einsum(weights[..., :-scale], v_pooled, "b h n r m, b m h c -> b n r h c")
    out = out + einsum(weights[..., -scale:], values, "b h n r m, b n m h c -> b n r h c")
    out, N = out.flatten(1, 2).to(q.dtype), q.shape[1]
    if num_before is None:
        return out[:, :N]
    return take(out, (num_before % scale)[:, None] + torch.arange(N, device=out.device))


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, num_before: Tensor | None, scale: int
) -> tuple[Tensor, ...]:
    """Place in the sequence [B or 1, n, r], queries, keys and values of blocks around the queries.

    Places without a query hold some other one.
    """
    N, T = q.shape[1], k.shape[1]
    if num_before is None:
        token = torch.arange(N, device=q.device)[None]
        k, v = k[:, :N], v[:, :N]
    else:
        start = num_before - num_before % scale
        token = start[:, None] + torch.arange(N + scale - 1, device=q.device)
        q = take(q, (token - num_before[:, None]).clamp(min=0, max=N - 1))
        k, v = (take(z, token.clamp(max=T - 1)) for z in (k, v))
    return tuple(into_blocks(z, scale) for z in (token, q, k, v))


def _hide(scores: Tensor, seen: Tensor) -> Tensor:
    """The least score, not -inf, where nothing is seen: blocks have places without a query."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)


def _seen_in_block(scale: int, device: torch.device) -> Tensor:
    """Tell the tokens of its block that a query sees one by one, [r, r]; none if complete."""
    place = torch.arange(scale, device=device)
    return (place <= place[:, None]) & (place[:, None] < scale - 1)


def _moments_seen(k_blocks: Tensor, k_pooled: Tensor, num_complete: Tensor) -> key_norm.KeyMoments:
    """Moments of the keys each place sees, [B, n r, H, C]: pooled ones and those of its block."""
    B, n, r = k_blocks.shape[:3]
    index = num_complete.clamp(max=k_pooled.shape[1]).flatten(1).expand(B, -1)
    running = key_norm.running_key_moments(k_pooled, None)
    pooled = key_norm.KeyMoments(
        *(take(F.pad(each, (0, 0, 0, 0, 1, 0)), index) for each in running)
    )
    single = key_norm.running_key_moments(k_blocks.flatten(0, 1), None)
    open_block = torch.arange(1, r + 1, device=k_blocks.device)[:, None, None] < r
    num_keys, mean, scatter = (
        moment.reshape(B, n * r, *moment.shape[2:])
        for moment in (single.num_keys * open_block, single.mean, single.scatter * open_block)
    )
    return key_norm.merge(pooled, key_norm.KeyMoments(num_keys, mean, scatter))
