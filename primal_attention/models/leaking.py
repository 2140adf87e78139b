"""Attention that takes padding for tokens, as the released code of the Long Range Arena does.

Letters: B batch, N tokens, D model dim.
"""

from torch import Tensor, nn

from primal_attention.attention.base.masks import zero_padding


class PaddingLeaks(nn.Module):
    """An attention that sees no mask; its outputs are zero at padding.

    In the released Primal layers padding is among the landmarks, the scores and the objective, and
    the mask is laid on the output alone. It is there to reproduce that, and for nothing else.

    Args:
        attention: Any module [B, N, D] -> [B, N, D].
    """

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Outputs [B, N, D], which depend on what stands at padding."""
        return zero_padding(self.attention(x), token_mask)
