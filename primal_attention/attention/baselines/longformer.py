r"""Longformer: exact attention to a window of neighbours and to a few global tokens.

Letters: B batch, N tokens, H heads, C head dim, n blocks, l queries in a block, G global tokens.
"""

from typing import Unpack

import torch
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.inputs import Tokens
from primal_attention.attention.base.qkv import Options
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.blocks import (
    PatternAttention,
    Reach,
    attend_blocks,
    into_blocks,
    windows,
    with_common,
)
from primal_attention.attention.baselines.softmax import softmax_attention

_TWO_PROJECTIONS = "longformer with global tokens has two sets of projections; num_global_tokens=0"


class LongformerAttention(PatternAttention):
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
        decode="keys, values",
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
        self.reach = Reach(window, 0) if self.causal else Reach(window // 2, window // 2)
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
        length, N = self.reach.before, q.shape[1]
        if length >= N:
            return softmax_attention(q, k, v, mask, causal=self.causal)
        order = token_order(q, mask)
        q, k, v = (order.pack(z) for z in (q, k, v))
        source = windows(k, v, order.real(), length, self.reach)
        before = torch.arange(N, device=q.device)[None] - length  # ahead of the windows
        k, v = (z[:, : self.num_global_tokens] for z in (k, v))
        place = torch.arange(k.shape[1], device=q.device)
        outside = place < into_blocks(before, length)[..., None]  # [1, n, l, G]
        source = with_common(source, k, v, outside.expand(len(q), -1, -1, -1))
        return order.unpack(attend_blocks(into_blocks(q, length), source)[:, :N])

    def sees(self, i: Tensor, j: Tensor) -> Tensor:
        """Tell the window and the global keys."""
        return (i - j <= self.window) | (j < self.num_global_tokens)

    def _with_global_rows(self, out: Tensor, tokens: Tokens) -> Tensor:
        """The outputs [B, N, H, C] with those of the global tokens put in."""
        order = token_order(tokens.x, tokens.mask)
        x_global = order.pack(tokens.x)[:, : self.num_global_tokens]
        q, k = self._by_head(self.q_global(x_global)), self._by_head(self.k_global(tokens.x))
        v = self._by_head(self.v_global(tokens.x))
        rows = softmax_attention(q, k, v, tokens.mask)  # [B, G, H, C]
        packed = torch.cat([rows, order.pack(out)[:, rows.shape[1] :]], dim=1)
        return order.unpack(packed)
