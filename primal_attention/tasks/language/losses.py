"""The loss of each token under a large vocabulary, within the memory of its logits.

Letters: B batch, N tokens, V symbols, R rows: the tokens of a batch.
"""

from typing import Any

import torch
from torch import Tensor

from primal_attention.precision import accumulation_dtype

_PIECE = 2**24  # logits that are looked at together


def token_losses(logits: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy [B, N] of logits [B, N, V], which **end as their own gradient**.

    With 267,735 symbols the logits of a batch are most of a GPU; a second copy would not fit. The
    backward pass overwrites them, so they must not be used after it, and it runs once.

    Args:
        logits: Of the next token.
        target: That token [B, N]; where it is negative the loss is 0.
    """
    losses = _TokenLosses.apply(logits.flatten(0, 1), target.flatten().long())  # type: ignore[no-untyped-call]
    return losses.view(target.shape)  # type: ignore[no-any-return]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Losses [R] of logits [R, V]."""
        counted, index = target >= 0, target.clamp(min=0)[:, None]
        pieces = torch.split(logits, _rows(logits))
        total = torch.cat([_wide(piece).logsumexp(-1) for piece in pieces])
        ctx.save_for_backward(logits, counted, index, total)
        return (total - logits.gather(-1, index)[:, 0]).masked_fill_(~counted, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The softmax minus one at the target, times the gradient of each loss."""
        logits, counted, index, total = ctx.saved_tensors
        d_losses = gradients[0].masked_fill(~counted, 0.0)[:, None]
        for start in range(0, len(logits), _rows(logits)):
            rows = slice(start, start + _rows(logits))
            softmax = (_wide(logits[rows]) - total[rows, None]).exp_()
            logits[rows] = softmax.mul_(d_losses[rows])
        logits.scatter_add_(-1, index, -d_losses.to(logits.dtype))
        return logits, None


def _wide(piece: Tensor) -> Tensor:
    return piece.to(accumulation_dtype(piece.dtype))


def _rows(logits: Tensor) -> int:
    return max(1, _PIECE // logits.shape[-1])
