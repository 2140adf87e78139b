"""Classification (or regression) of sequences of vectors or of symbols.

Letters: B batch, N tokens, D model dim, C channels, K outputs.
"""

from __future__ import annotations

from torch import Tensor, nn

from primal_attention.attention.options import check_sizes
from primal_attention.models.encoder import Encoder
from primal_attention.models.tower import Tower


class SequenceClassifier(nn.Module):
    """A linear head on a :class:`~primal_attention.models.tower.Tower`.

    Args:
        embedding: Makes vectors [B, N, D] of the tokens.
        encoder: A stack of blocks of the same dimension.
        num_outputs: Classes, or numbers to predict.
        pooling: What the head reads: ``"mean"``, ``"class_token"`` or ``"flatten"``.
        num_tokens: The longest sequence; only ``"flatten"`` needs it.
        dropout: Probability of dropout of the embedded tokens and before the head.
        mask_attention: Whether attention sees the mask, which in the released code for time series
            it does not.
    """

    def __init__(
        self,
        embedding: nn.Module,
        encoder: Encoder,
        num_outputs: int,
        *,
        pooling: str = "mean",
        num_tokens: int | None = None,
        dropout: float = 0.0,
        mask_attention: bool = True,
    ):
        check_sizes(num_outputs=num_outputs)
        super().__init__()
        self.tower = Tower(
            embedding,
            encoder,
            pooling=pooling,
            num_tokens=num_tokens,
            dropout=dropout,
            mask_attention=mask_attention,
        )
        self.head = nn.Linear(self.tower.num_features, num_outputs)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Logits [B, K] of sequences of vectors [B, N, C] or of symbols [B, N]."""
        logits: Tensor = self.head(self.pooled(x, token_mask=token_mask))
        return logits

    def pooled(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """What the head reads: [B, D], or [B, num_tokens * D] where outputs are flattened."""
        features: Tensor = self.tower(x, token_mask=token_mask)
        return features
