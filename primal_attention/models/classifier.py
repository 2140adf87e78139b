"""Classification (or regression) of sequences of vectors or of symbols, and of pairs of them.

Letters: B batch, N tokens, D model dim, C channels, F features, K outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.inputs import check_mask, zero_padding
from primal_attention.attention.base.shards import Sharded
from primal_attention.attention.base.validation import (
    check_choice,
    check_probabilities,
    check_sizes,
)
from primal_attention.models.encoder import Encoder
from primal_attention.precision import accumulation_dtype

POOLINGS = ("mean", "class_token", "flatten", "padded_mean", "adaptive")


class Tower(Sharded):
    """An encoder between an embedding and a pooling: the features [B, F] of sequences.

    Args:
        embedding: Makes vectors [B, N, D] of the tokens.
        encoder: A stack of blocks of the same dimension.
        pooling: How the features are made. ``"mean"``: the mean over the real tokens.
            ``"class_token"``: the output at a learnt token put before the others. ``"flatten"``:
            all outputs side by side, zero at padding, as the paper does for time series; for
            sequences of at most ``num_tokens`` tokens. ``"padded_mean"``: the sum over the real
            tokens, divided by the padded length, as released for the Long Range Arena.
            ``"adaptive"``: a mean over the real tokens whose weights are a learnt softmax; they
            start equal. A linear head on it is a mean of logits of tokens.
        num_tokens: The longest sequence; only ``"flatten"`` needs it.
        dropout: Probability of dropout of the embedded tokens and of the features.
        drop_features: Apply dropout to the features too.
        mask_attention: Give attention the mask. The released code for time series lets padding
            into every layer and masks the output of the last alone; ``False`` does that, and what
            stands at padding then counts: zeros, in the released data.
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
        if pooling == "adaptive":
            self.importance = nn.Linear(encoder.dim, 1)
            nn.init.zeros_(self.importance.weight)

    @property
    def num_features(self) -> int:
        """Number of features F of a sequence."""
        dim = self.encoder.dim
        return dim * self.num_tokens if self.pooling == "flatten" and self.num_tokens else dim

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Compute features [B, F] of sequences of vectors [B, N, C] or of symbols [B, N]."""
        check_mask("token_mask", token_mask, x)
        if token_mask is not None and self.mask_attention:  # whatever padding holds, NaN included
            x = torch.where(token_mask if x.dim() == 2 else token_mask[..., None], x, 0)
        x = F.dropout(self.embedding(x), self.dropout, self.training)
        if token_mask is not None:
            token_mask = token_mask[:, :: getattr(self.embedding, "stride", 1)]
        if self.pooling == "class_token":
            x = torch.cat([self.class_token.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
            token_mask = None if token_mask is None else F.pad(token_mask, (1, 0), value=True)
        y = self.encoder(x, token_mask=token_mask if self.mask_attention else None)
        if self.pooling == "class_token":
            return self._features(y[:, 0])
        if self.pooling == "adaptive":
            return self._features(self._weighted_mean(y, token_mask))
        if self.pooling != "flatten":
            return self._features(self._mean_over_tokens(y, token_mask))
        return self._flatten(self._features(F.gelu(y)), token_mask)

    def _mean_over_tokens(self, y: Tensor, token_mask: Tensor | None) -> Tensor:
        """The mean over the real tokens, zero for a sequence without any, or over all, [B, D]."""
        if self.shard is None and token_mask is None:
            return y.mean(1)
        total = zero_padding(y, token_mask).sum(1, dtype=accumulation_dtype(y.dtype))
        if token_mask is None or self.pooling == "padded_mean":
            count = torch.full_like(total[:, :1], y.shape[1])
        else:
            count = token_mask.sum(1, keepdim=True).to(total.dtype)
        if self.shard is not None:
            total, count = self.shard.sum(total, count)
        return (total / count.clamp(min=1)).to(y.dtype)

    def needs_whole(self) -> str | None:
        """Say why sequences cannot be sharded; None where they can."""
        if self.pooling in ("mean", "padded_mean"):
            return None
        return f"pooling={self.pooling!r} reads outputs by their place; use pooling='mean'"

    def _weighted_mean(self, y: Tensor, token_mask: Tensor | None) -> Tensor:
        scores = self.importance(y)
        if token_mask is not None:  # finite: a sequence without a token has no NaN
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~token_mask[..., None], lowest)
        pooled: Tensor = (scores.softmax(1) * y).sum(1)
        return pooled

    def _flatten(self, y: Tensor, token_mask: Tensor | None) -> Tensor:
        assert self.num_tokens is not None
        missing = self.num_tokens - y.shape[1]
        if missing < 0:
            raise ValueError(f"x has {y.shape[1]} tokens; the head is made for {self.num_tokens}")
        return F.pad(zero_padding(y, token_mask), (0, 0, 0, missing)).flatten(1)

    def _features(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training and self.drop_features)


class SequenceClassifier(nn.Module):
    """A head on a :class:`Tower`: linear, or with a hidden layer.

    Args:
        embedding: Makes vectors [B, N, D] of the tokens.
        encoder: A stack of blocks of the same dimension.
        num_outputs: Classes, or numbers to predict.
        hidden_dim: Width of a hidden layer of the head, which reads its features undropped.
        **options: Those of :class:`Tower`: ``pooling``, ``num_tokens``, ``dropout`` and
            ``mask_attention``.
    """

    def __init__(
        self,
        embedding: nn.Module,
        encoder: Encoder,
        num_outputs: int,
        *,
        hidden_dim: int | None = None,
        **options: Any,
    ):
        check_sizes(num_outputs=num_outputs, hidden_dim=hidden_dim)
        super().__init__()
        self.tower = Tower(embedding, encoder, drop_features=hidden_dim is None, **options)
        features = self.tower.num_features
        self.hidden = None if hidden_dim is None else nn.Linear(features, hidden_dim)
        self.head = nn.Linear(hidden_dim or features, num_outputs)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Compute logits [B, K] of sequences of vectors [B, N, C] or of symbols [B, N]."""
        features = self.tower(x, token_mask=token_mask)
        if self.hidden is not None:
            features = F.relu(self.hidden(features))
        logits: Tensor = self.head(features)
        return logits


class TwoTowerClassifier(nn.Module):
    """A head with a hidden layer on [a; b; a * b; a - b], the features of a pair of sequences.

    One tower runs on both in a pass. For the KSVD objective to count both runs, a training step is
    ``with record_ksvd(model): logits = model(a, b)``; else it sees the run of b alone.

    Args:
        tower: Makes features [B, F] of a sequence.
        num_outputs: Classes, or numbers to predict.
        hidden_dim: Width of the hidden layer of the head.
    """

    def __init__(self, tower: Tower, num_outputs: int, *, hidden_dim: int = 128):
        check_sizes(num_outputs=num_outputs, hidden_dim=hidden_dim)
        super().__init__()
        self.tower = tower
        self.hidden = nn.Linear(4 * tower.num_features, hidden_dim)
        self.head = nn.Linear(hidden_dim, num_outputs)

    def forward(
        self,
        a: Tensor,
        b: Tensor,
        *,
        mask_a: Tensor | None = None,
        mask_b: Tensor | None = None,
    ) -> Tensor:
        """Compute logits [B, K] of pairs of sequences, of vectors [B, N, C] or of symbols [B, N].

        The sequences of a pair may have different lengths.
        """
        if a.shape[0] != b.shape[0]:
            raise ValueError(
                f"a and b must be as many sequences, got {a.shape[0]} and {b.shape[0]}"
            )
        a, b = self.tower(a, token_mask=mask_a), self.tower(b, token_mask=mask_b)
        pair = torch.cat([a, b, a * b, a - b], dim=-1)
        logits: Tensor = self.head(F.relu(self.hidden(pair)))
        return logits
