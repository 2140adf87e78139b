r"""Linformer: attention to a fixed number of linear combinations of the tokens.

Letters: B batch, N tokens, T source tokens, H heads, C head dim, M projected tokens.
"""

from typing import Unpack

import torch
from einops import einsum
from torch import Tensor, nn

from primal_attention.attention.base.card import Mechanism
from primal_attention.attention.base.compaction import token_order
from primal_attention.attention.base.inputs import zero_padding
from primal_attention.attention.base.qkv import Options, QKVAttention
from primal_attention.attention.base.validation import check_sizes
from primal_attention.attention.baselines.softmax import softmax_attention


class LinformerAttention(QKVAttention):
    r"""Softmax attention over projected keys and values, Wang et al. 2020.

    $y_i = \sum_{m \le M} softmax_m(q_i^\top (E K)_m / \sqrt C)\, (F V)_m$ with the learned maps
    $E, F$ from at most ``max_tokens`` tokens to M, shared by the heads. Column t of E belongs to
    the t-th *real* token of the sequence, so that padding changes nothing wherever it stands.

    Not causal: each projected key is made of all tokens.

    Args:
        max_tokens: Longest sequence of keys, padding included; more is a ValueError.
        num_projected: M, at most ``max_tokens``; 256 if None, or ``max_tokens`` where that is less.
        share_kv: One map for keys and values, F = E.
        **options: Those of :class:`QKVAttention`; ``causal`` is not possible.
    """

    mechanism = Mechanism(
        "Wang et al., 2020",
        "N",
        cross=True,
        fused="SDPA",
        needs_max_tokens=True,
        rank_bound=lambda layer: layer.num_projected,
    )
    shown = ("max_tokens", "num_projected", "share_kv")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        max_tokens: int = 512,
        num_projected: int | None = None,
        share_kv: bool = False,
        **options: Unpack[Options],
    ):
        super().__init__(dim, num_heads, **options)
        check_sizes(max_tokens=max_tokens, num_projected=num_projected)
        num_projected = min(256, max_tokens) if num_projected is None else num_projected
        if num_projected > max_tokens:
            raise ValueError(f"num_projected must be at most {max_tokens=}, got {num_projected}")
        self.max_tokens, self.num_projected, self.share_kv = max_tokens, num_projected, share_kv
        # E and F are kept transposed: one row for each token.
        self.e_proj = nn.Parameter(torch.empty(max_tokens, num_projected))
        self.f_proj = None if share_kv else nn.Parameter(torch.empty(max_tokens, num_projected))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start E and F with entries of variance 1 / M, as in theorem 2 of the paper."""
        for weight in (self.e_proj, self.f_proj):
            if weight is not None:
                nn.init.normal_(weight, std=self.num_projected**-0.5)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """Project keys and values along the tokens, then SDPA."""
        T = k.shape[1]
        if self.max_tokens < T:
            raise ValueError(f"at most max_tokens={self.max_tokens} keys, got {T}")
        f_proj = self.e_proj if self.f_proj is None else self.f_proj
        order = token_order(k, source_mask)
        k, v = (order.pack(zero_padding(z, source_mask)) for z in (k, v))
        k, v = _projected(k, self.e_proj[:T]), _projected(v, f_proj[:T])
        return softmax_attention(q, k, v)


def _projected(z: Tensor, projection: Tensor) -> Tensor:
    """Sums [B, M, H, C] of the tokens [B, T, H, C] with the weights [T, M].

    Contiguous: the fused kernels of SDPA want heads whose channels lie side by side, and without
    them torch would write out all weights in float32.
    """
    return einsum(z, projection, "b t h c, t m -> b m h c").contiguous()
