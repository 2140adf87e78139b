"""Classification (or regression) of sequences of vectors or of symbols.

Letters: B batch, N tokens, D model dim, C channels, K outputs.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.validation import check_sizes
from primal_attention.models.encoder import Encoder
from primal_attention.models.tower import Tower


class SequenceClassifier(nn.Module):
    """A head on a :class:`~primal_attention.models.tower.Tower`: linear, or with a hidden layer.

    Args:
        embedding: Makes vectors [B, N, D] of the tokens.
        encoder: A stack of blocks of the same dimension.
        num_outputs: Classes, or numbers to predict.
        pooling: What the head reads: ``"mean"``, ``"class_token"``, ``"flatten"`` or
            ``"padded_mean"``.
        num_tokens: The longest sequence; only ``"flatten"`` needs it.
        dropout: Probability of dropout of the embedded tokens and before a linear head.
        mask_attention: Whether attention sees the mask, which in the released code for time series
            it does not.
        hidden_dim: Width of a hidden layer of the head, which reads its features undropped.
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
        hidden_dim: int | None = None,
    ):
        check_sizes(num_outputs=num_outputs, hidden_dim=hidden_dim)
        super().__init__()
        self.tower = Tower(
            embedding,
            encoder,
            pooling=pooling,
            num_tokens=num_tokens,
            dropout=dropout,
            drop_features=hidden_dim is None,
            mask_attention=mask_attention,
        )
        features = self.tower.num_features
        self.hidden = None if hidden_dim is None else nn.Linear(features, hidden_dim)
        self.head = nn.Linear(hidden_dim or features, num_outputs)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Logits [B, K] of sequences of vectors [B, N, C] or of symbols [B, N]."""
        features = self.pooled(x, token_mask=token_mask)
        if self.hidden is not None:
            features = F.relu(self.hidden(features))
        logits: Tensor = self.head(features)
        return logits

    def pooled(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """What the head reads: [B, D], or [B, num_tokens * D] where outputs are flattened."""
        features: Tensor = self.tower(x, token_mask=token_mask)
        return features
