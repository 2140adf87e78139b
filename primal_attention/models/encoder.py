"""Encoder blocks around any attention, and stacks of them from a list of attentions.

Letters: B batch, N tokens, D model dim.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from primal_attention.attention.base.validation import (
    check_choice,
    check_probabilities,
    check_sizes,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu}


class EncoderBlock(nn.Module):
    """Attention, then a feed-forward layer, each inside a residual connection.

    Args:
        attention: Any module [B, N, D] -> [B, N, D] that takes a ``token_mask``.
        dim: Model dimension D.
        ffn_dim: Width of the feed-forward layer.
        norm: ``"pre"`` normalises the input of a branch, ``"post"`` the sum after it.
        dropout: Probability of dropout of the output of a branch, and in the feed-forward layer.
        activation: ``"gelu"`` or ``"relu"``, of the feed-forward layer.
    """

    def __init__(
        self,
        attention: nn.Module,
        dim: int,
        ffn_dim: int,
        *,
        norm: str = "pre",
        dropout: float = 0.0,
        activation: str = "gelu",
    ):
        check_sizes(dim=dim, ffn_dim=ffn_dim)
        check_choice("norm", norm, ("pre", "post"))
        check_choice("activation", activation, ACTIVATIONS)
        check_probabilities(dropout=dropout)
        super().__init__()
        self.norm, self.dropout, self.activation = norm, dropout, activation
        self.attention = attention
        self.attention_norm = nn.LayerNorm(dim)
        self.ffn_in = nn.Linear(dim, ffn_dim)
        self.ffn_out = nn.Linear(ffn_dim, dim)
        self.ffn_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Return outputs [B, N, D]; at padded positions they mean nothing."""
        return self._add(x, self.attention(self._read(x), token_mask=token_mask))

    def prefill(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return outputs of tokens x [B, N, D] that follow a state, and the state after them."""
        mixed, state = self.attention.prefill(self._read(x), state)  # type: ignore[operator]
        return self._add(x, mixed), state

    def _read(self, x: Tensor) -> Tensor:
        """The input of the attention."""
        read: Tensor = self.attention_norm(x) if self.norm == "pre" else x
        return read

    def _add(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the outputs of the attention to x, then those of the feed-forward layer."""
        x = x + self._drop(mixed)
        if self.norm == "pre":
            return x + self._drop(self._feed_forward(self.ffn_norm(x)))
        x = self.attention_norm(x)
        y: Tensor = self.ffn_norm(x + self._drop(self._feed_forward(x)))
        return y

    def _feed_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.ffn_out(self._drop(ACTIVATIONS[self.activation](self.ffn_in(x))))
        return y

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Encoder(nn.Module):
    """A stack of blocks, one for each attention of a list, and a last LayerNorm.

    PrimalFormer is a list of Primal layers; Primal.+ has softmax attention in all but the last.

    Args:
        attentions: One for each block.
        dim: Model dimension D.
        ffn_dim: Width of the feed-forward layers.
        **options: Those of :class:`EncoderBlock`: ``norm``, ``dropout`` and ``activation``.
    """

    def __init__(self, attentions: Iterable[nn.Module], dim: int, ffn_dim: int, **options: Any):
        super().__init__()
        self.blocks = nn.ModuleList(
            EncoderBlock(attention, dim, ffn_dim, **options) for attention in attentions
        )
        if not self.blocks:
            raise ValueError("attentions is empty: an encoder has at least one block")
        self.dim = dim
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Return outputs [B, N, D]; at padded positions they mean nothing."""
        for block in self.blocks:
            x = block(x, token_mask=token_mask)
        y: Tensor = self.final_norm(x)
        return y

    def init_state(self, batch_size: int) -> tuple[Any, ...]:
        """Return the state of each attention before the first token of ``batch_size`` sequences."""
        attentions = [block.attention for block in self.blocks]
        for i, attention in enumerate(attentions):
            if not hasattr(attention, "init_state"):
                raise ValueError(f"layer {i}: {type(attention).__name__} has no decode state")
        return tuple(attention.init_state(batch_size) for attention in attentions)  # type: ignore[operator, union-attr]

    def prefill(self, x: Tensor, states: Sequence[Any]) -> tuple[Tensor, tuple[Any, ...]]:
        """Return outputs of tokens x [B, N, D] that follow one state a block, and new states."""
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.prefill(x, state)  # type: ignore[operator]
            after.append(state)
        return self.final_norm(x), tuple(after)
