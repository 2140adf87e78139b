"""Tokens and their positions as vectors.

Letters: B batch, N tokens, D model dim, C channels.
"""

import math

import torch
from torch import Tensor, nn

from primal_attention.attention.base.validation import check_sizes


class Embedding(nn.Module):
    """Tokens and their positions as vectors [B, N, D].

    Args:
        dim: Model dimension D.
        num_tokens: The longest sequence, which is how many positions are learnt.
        num_channels: Of a token that is a vector; a linear map reads it.
        kernel_size: How many neighbouring vectors that map reads, itself in the middle; odd.
        vocab_size: Of tokens that are symbols; a table has a vector for each.
        init_range: Positions start uniform in plus or minus this.
    """

    def __init__(
        self,
        dim: int,
        num_tokens: int,
        *,
        num_channels: int | None = None,
        kernel_size: int = 1,
        vocab_size: int | None = None,
        init_range: float = 0.02,
    ):
        check_sizes(
            dim=dim, num_tokens=num_tokens, num_channels=num_channels, vocab_size=vocab_size
        )
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd and positive, got {kernel_size}")
        if (num_channels is None) == (vocab_size is None):
            raise ValueError(
                "give num_channels (tokens are vectors) or vocab_size (tokens are symbols), "
                f"got {num_channels=}, {vocab_size=}"
            )
        super().__init__()
        self.num_channels, self.scale = num_channels, math.sqrt(dim)
        self.tokens = (
            _table(vocab_size, dim)
            if num_channels is None
            else _reader(num_channels, dim, kernel_size)
        )
        self.positions = nn.Parameter(
            torch.empty(num_tokens, dim).uniform_(-init_range, init_range)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Embed x, [B, N, C] of vectors or [B, N] of symbols, of any integer type."""
        self._check(x)
        embedded: Tensor = self.tokens(x if self.num_channels is not None else wide_enough(x))
        if self.num_channels is not None:
            embedded = embedded * self.scale
        return embedded + self.positions[: x.shape[1]]

    def _check(self, x: Tensor) -> None:
        if self.num_channels is None:
            check_symbols("x", x)
        elif x.dim() != 3 or x.shape[-1] != self.num_channels:
            raise ValueError(f"x must be [batch, tokens, {self.num_channels}], got {list(x.shape)}")
        N, longest = x.shape[1], len(self.positions)
        if longest < N:
            raise ValueError(f"x has {N} tokens; the model has positions for {longest}")


def check_symbols(name: str, ids: Tensor) -> None:
    """Raise unless the ids are integers [B, N]."""
    if ids.dim() != 2 or ids.is_floating_point():
        raise ValueError(
            f"{name} must be integers [batch, tokens], got {ids.dtype} {list(ids.shape)}"
        )


def wide_enough(ids: Tensor) -> Tensor:
    """The ids in a type that a table can be read with; they may be kept in any integer type."""
    return ids.int() if ids.element_size() < 4 else ids


def _reader(num_channels: int, dim: int, kernel_size: int) -> nn.Module:
    if kernel_size == 1:
        return nn.Linear(num_channels, dim)
    return _Convolution(num_channels, dim, kernel_size)


class _Convolution(nn.Module):
    """A linear map of each vector and its neighbours; beyond the ends there are zeros."""

    def __init__(self, num_channels: int, dim: int, kernel_size: int):
        super().__init__()
        self.conv = nn.Conv1d(num_channels, dim, kernel_size, padding=kernel_size // 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.mT).mT
        return y


def _table(vocab_size: int | None, dim: int) -> nn.Embedding:
    assert vocab_size is not None
    table = nn.Embedding(vocab_size, dim)
    nn.init.normal_(table.weight, std=0.02)
    return table
