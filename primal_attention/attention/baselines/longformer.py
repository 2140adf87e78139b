r"""Longformer: exact attention to a window of neighbours and to a few global tokens.

Letters: B batch, N tokens, H heads, C head dim, W tokens before the window's own, G global tokens.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import Compaction, take, token_order
from primal_attention.attention.base.masks import Tokens
from primal_attention.attention.base.qkv import DecodingAttention, Options
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines import blocks
from primal_attention.attention.baselines.softmax import softmax_attention
from primal_attention.precision import accumulate

_TWO_PROJECTIONS = "longformer with global tokens has two sets of projections; num_global_tokens=0"


class WindowCache(NamedTuple):
    """Keys and values of the last tokens and of the global ones, in at least float32."""

    k: Tensor  # [B, W, H, C]: of the last W real tokens, at the end where they are fewer
    v: Tensor
    mask: Tensor  # [B, W], 1 where there is a token
    global_k: Tensor  # [B, G, H, C]: of the first G real tokens, undefined where not yet seen
    global_v: Tensor
    num_tokens: Tensor  # [B]


class LongformerAttention(DecodingAttention):
    r"""Sliding window and global attention, Beltagy et al. 2020.

    $y_i = \sum_{j \in A_i} softmax_j(q_i^\top k_j / \sqrt C)\, v_j$ with
    $A_i = \{j : |i - j| \le w / 2\} \cup \{j < G\}$, where i and j count the real tokens. The
    first G of them are global: all tokens see them, and they see all tokens, through projections of
    their own (``q_global``, ``k_global``, ``v_global``).

    Causal: $A_i = \{j : i - w \le j \le i\} \cup \{j < G, j \le i\}$, as many keys as before. What
    a global token sees then lies among the global tokens, so there are no global projections.

    Args:
        window: Width w of the window, an even number.
        num_global_tokens: How many of the first real tokens are global, G; 1 for a class token.
        **options: Those of :class:`QKVAttention`.
    """

    mechanism = Mechanism(
        "Beltagy et al., 2020",
        "N w",
        causal=True,
        decode="keys and values of the last w tokens and of the global ones",
        fused="SDPA",
        no_matrix=lambda layer: _TWO_PROJECTIONS if layer.has_global_rows else None,
    )
    shown = ("window", "num_global_tokens")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window: int = 512,
        num_global_tokens: int = 1,
        **options: Unpack[Options],
    ):
        super().__init__(dim, num_heads, **options)
        check_sizes(window=window)
        if window % 2:
            raise ValueError(f"window must be even, got {window}")
        if not isinstance(num_global_tokens, int) or num_global_tokens < 0:
            raise ValueError(f"num_global_tokens must be 0 or more, got {num_global_tokens!r}")
        self.window, self.num_global_tokens = window, num_global_tokens
        self.reach = (
            blocks.Reach(window, 0) if self.causal else blocks.Reach(window // 2, window // 2)
        )
        self.has_global_rows = num_global_tokens > 0 and not self.causal
        if self.has_global_rows:
            bias = self.q_proj.bias is not None
            self.q_global = nn.Linear(dim, dim, bias=bias)
            self.k_global = nn.Linear(dim, dim, bias=bias)
            self.v_global = nn.Linear(dim, dim, bias=bias)

    def _attended(self, tokens: Tokens, source: Tokens) -> Tensor:
        out = super()._attended(tokens, source)
        return self._with_global_rows(out, tokens) if self.has_global_rows else out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Compute all pairs where they are within reach, windows and global keys otherwise."""
        if self.reach.before >= q.shape[1]:
            return softmax_attention(q, k, v, mask, causal=self.causal)
        order = token_order(q, mask)
        joined = _joined(self._empty_cache(k), order.pack(k), order.pack(v), order)
        return order.unpack(_attend(order.pack(q), joined, self.reach))

    def init_state(self, batch_size: int) -> WindowCache:
        """Return an empty cache."""
        return self._empty_cache(self._zeros(batch_size, 0, self.num_heads, self.head_dim))

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, state: WindowCache, mask: Tensor | None
    ) -> tuple[Tensor, WindowCache]:
        """Attend to the cache and to the new tokens up to each."""
        order = token_order(q, mask)
        joined = _joined(state, order.pack(k), order.pack(v), order)
        out = order.unpack(_attend(order.pack(q), joined, self.reach))
        return out, _last(joined, order, self.window)

    def _empty_cache(self, like: Tensor) -> WindowCache:
        B, _, H, C = like.shape
        k = like.new_zeros(B, self.reach.before, H, C)
        global_k = like.new_zeros(B, self.num_global_tokens, H, C)
        return WindowCache(k, k, k[:, :, 0, 0], global_k, global_k, like.new_zeros(B))

    def _with_global_rows(self, out: Tensor, tokens: Tokens) -> Tensor:
        """The outputs [B, N, H, C] with those of the global tokens put in."""
        order = token_order(tokens.x, tokens.mask)
        x_global = order.pack(tokens.x)[:, : self.num_global_tokens]
        q, k = self._by_head(self.q_global(x_global)), self._by_head(self.k_global(tokens.x))
        v = self._by_head(self.v_global(tokens.x))
        rows = softmax_attention(q, k, v, tokens.mask)  # [B, G, H, C]
        packed = torch.cat([rows, order.pack(out)[:, rows.shape[1] :]], dim=1)
        return order.unpack(packed)


def _joined(cache: WindowCache, k: Tensor, v: Tensor, order: Compaction) -> WindowCache:
    """The cache with the new tokens behind those of the window, and the global ones filled in."""
    B, G = cache.global_k.shape[:2]
    seen = cache.num_tokens.long()[:, None]
    place = torch.arange(G, device=k.device).expand(B, -1)
    place = torch.where(place < seen, place, G + place - seen).clamp(max=G + order.shape[1] - 1)
    return WindowCache(
        torch.cat([cache.k.to(k.dtype), k], dim=1),
        torch.cat([cache.v.to(v.dtype), v], dim=1),
        torch.cat([cache.mask, order.real().to(cache.mask.dtype)], dim=1),
        take(torch.cat([cache.global_k.to(k.dtype), k], dim=1), place),
        take(torch.cat([cache.global_v.to(v.dtype), v], dim=1), place),
        cache.num_tokens,
    )


def _attend(q: Tensor, joined: WindowCache, reach: blocks.Reach) -> Tensor:
    """Outputs of packed queries [B, N, H, C]: the window, and the global keys outside of it."""
    N = q.shape[1]
    length = reach.before if reach.before < N else N
    source = blocks.windows(joined.k, joined.v, joined.mask > 0, length, reach)
    first = joined.num_tokens.long()[:, None] + torch.arange(N, device=q.device) - reach.before
    place = torch.arange(joined.global_k.shape[1], device=q.device)
    outside = place < blocks.into_blocks(first, length)[..., None]  # [B, n, l, G]
    source = blocks.with_common(source, joined.global_k, joined.global_v, outside)
    return blocks.attend_blocks(blocks.into_blocks(q, length), source)[:, :N]


def _last(joined: WindowCache, order: Compaction, window: int) -> WindowCache:
    """The cache after the new tokens: the last ones, in at least float32."""
    last = order.num_real[:, None] + torch.arange(window, device=joined.k.device)
    return WindowCache(
        accumulate(take(joined.k, last)),
        accumulate(take(joined.v, last)),
        take(joined.mask, last),
        accumulate(joined.global_k),
        accumulate(joined.global_v),
        joined.num_tokens + order.num_real,
    )
