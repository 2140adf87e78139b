"""From a sequence to one vector: embedding, encoder, pooling.

Letters: B batch, N tokens, D model dim, C channels, F features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.masks import check_mask, zero_padding
from primal_attention.attention.base.validation import (
    check_choice,
    check_probabilities,
    check_sizes,
)
from primal_attention.models.encoder import Encoder
from primal_attention.precision import accumulation_dtype

POOLINGS = ("mean", "class_token", "flatten", "padded_mean")


class Tower(nn.Module):
    """An encoder between an embedding and a pooling: the features [B, F] of sequences.

    Args:
        embedding: Makes vectors [B, N, D] of the tokens.
        encoder: A stack of blocks of the same dimension.
        pooling: What the features are. ``"mean"``: the mean over the real tokens.
            ``"class_token"``: the output at a learnt token put before the others. ``"flatten"``:
            all outputs side by side, zero at padding, as the paper does for time series; for
            sequences of at most ``num_tokens`` tokens. ``"padded_mean"``: the sum over the real
            tokens, divided by the padded length, as released for the Long Range Arena.
        num_tokens: The longest sequence; only ``"flatten"`` needs it.
        dropout: Probability of dropout of the embedded tokens and of the features.
        drop_features: Whether the features are dropped too.
        mask_attention: Whether attention sees the mask. The released code for time series lets
            padding into every layer and masks the output of the last alone; ``False`` does that,
            and what stands at padding then counts: zeros, in the released data.
    """

    def __init__(
        self,
        embedding: nn.Module,
        encoder: Encoder,
        *,
        pooling: str = "mean",
        num_tokens: int | None = None,
        dropout: float = 0.0,
        drop_features: bool = True,
        mask_attention: bool = True,
    ):
        check_sizes(num_tokens=num_tokens)
        check_choice("pooling", pooling, POOLINGS)
        check_probabilities(dropout=dropout)
        if pooling == "flatten" and num_tokens is None:
            raise ValueError("pooling='flatten' needs num_tokens, the longest sequence")
        super().__init__()
        self.pooling, self.num_tokens, self.dropout = pooling, num_tokens, dropout
        self.drop_features, self.mask_attention = drop_features, mask_attention
        self.embedding, self.encoder = embedding, encoder
        if pooling == "class_token":
            self.class_token = nn.Parameter(torch.empty(encoder.dim).uniform_(-0.02, 0.02))

    @property
    def num_features(self) -> int:
        """How many features F a sequence has."""
        dim = self.encoder.dim
        return dim * self.num_tokens if self.pooling == "flatten" and self.num_tokens else dim

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Features [B, F] of sequences of vectors [B, N, C] or of symbols [B, N]."""
        check_mask("token_mask", token_mask, x)
        if token_mask is not None and self.mask_attention:  # whatever padding holds, NaN included
            x = torch.where(token_mask if x.dim() == 2 else token_mask[..., None], x, 0)
        x = self._drop(self.embedding(x))
        if self.pooling == "class_token":
            return self._features(self._encode(*self._with_class_token(x, token_mask))[:, 0])
        y = self._encode(x, token_mask)
        if self.pooling == "mean":
            return self._features(_mean_over_tokens(y, token_mask))
        if self.pooling == "padded_mean":
            return self._features(zero_padding(y, token_mask).mean(1))
        return self._flatten(self._features(F.gelu(y)), token_mask)

    def _encode(self, x: Tensor, token_mask: Tensor | None) -> Tensor:
        y: Tensor = self.encoder(x, token_mask=token_mask if self.mask_attention else None)
        return y

    def _with_class_token(
        self, x: Tensor, token_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x = torch.cat([self.class_token.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
        return x, None if token_mask is None else F.pad(token_mask, (1, 0), value=True)

    def _flatten(self, y: Tensor, token_mask: Tensor | None) -> Tensor:
        assert self.num_tokens is not None
        missing = self.num_tokens - y.shape[1]
        if missing < 0:
            raise ValueError(f"x has {y.shape[1]} tokens; the head is made for {self.num_tokens}")
        return F.pad(zero_padding(y, token_mask), (0, 0, 0, missing)).flatten(1)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)

    def _features(self, x: Tensor) -> Tensor:
        return self._drop(x) if self.drop_features else x


def _mean_over_tokens(y: Tensor, token_mask: Tensor | None) -> Tensor:
    """The mean over the real tokens, zero for a sequence without any, [B, D]."""
    if token_mask is None:
        return y.mean(1)
    total = zero_padding(y, token_mask).sum(1, dtype=accumulation_dtype(y.dtype))
    return (total / token_mask.sum(1, keepdim=True).clamp(min=1)).to(y.dtype)
