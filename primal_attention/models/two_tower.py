"""Classification of pairs of sequences, such as whether one document cites the other.

Letters: B batch, N tokens, C channels, F features, K outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.validation import check_sizes
from primal_attention.models.tower import Tower


class TwoTowerClassifier(nn.Module):
    """A head on what one tower makes of either sequence: [a; b; a * b; a - b], a hidden layer.

    The tower runs twice in a pass. For the KSVD objective to count both runs, a training step is
    ``with record_ksvd(model): logits = model(a, b)``; else it sees the run of b alone.

    Args:
        tower: Makes features [B, F] of a sequence; both sequences go through the same one.
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
        """Logits [B, K] of pairs of sequences of vectors [B, N, C] or of symbols [B, N].

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
