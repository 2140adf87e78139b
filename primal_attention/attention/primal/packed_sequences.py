"""Packed sequences: all of them one after the other, with no padding between.

Their bounds are ``cu_seqlens``: sequence b has the tokens from ``cu_seqlens[b]`` to
``cu_seqlens[b + 1]``. What no sequence shares with another is computed on padded copies, which are
made and taken apart on the device.

Letters: B sequences, T tokens of all of them, L tokens of the longest, H heads, C head dim.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import Compaction, padded


class Padding(NamedTuple):
    """Packed sequences as ones that are all as long as the longest."""

    compaction: Compaction
    mask: Tensor  # [B, L], True at real tokens

    def pad(self, z: Tensor) -> Tensor:
        """The tokens [1, T, ...] as sequences [B, L, ...], with zeros at padding."""
        return self.compaction.pack(z[0])

    def unpad(self, z: Tensor) -> Tensor:
        """The inverse of :meth:`pad`."""
        return self.compaction.unpack(z)[None]


class Sequences(NamedTuple):
    """The sequences that are packed along one axis."""

    bounds: Tensor  # [B + 1], int64: from 0 to T, non-decreasing
    num_tokens: int  # T
    longest: int | None  # L, where the caller has said it

    @property
    def number(self) -> int:
        """B."""
        return self.bounds.shape[0] - 1

    def padding(self) -> Padding:
        """Pad to the longest; synchronises where its length was not given."""
        return Padding(*padded(self.bounds, self.num_tokens, self._longest()))

    def _longest(self) -> int:
        if self.longest is not None:
            return self.longest
        if torch.compiler.is_compiling():
            raise ValueError("max_seqlen must be given under torch.compile, got None")
        return int(self.bounds.diff().max())


def packed_sequences(x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, dim: int) -> Sequences:
    """The sequences packed in x, whose bounds are checked where that makes no device wait."""
    T = _num_tokens(x, dim)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens must be an int32 or int64 tensor, got {cu_seqlens.dtype}; "
            f"convert it with cu_seqlens.int()"
        )
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must have shape [sequences + 1] with at least one sequence, "
            f"got {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != x.device:
        raise ValueError(
            f"cu_seqlens must be on the device {x.device} of x, got {cu_seqlens.device}; "
            f"move it with cu_seqlens.to(x.device)"
        )
    if max_seqlen is not None and max_seqlen < 1:
        raise ValueError(f"max_seqlen must be at least 1, got {max_seqlen}")
    if cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_bounds(cu_seqlens.tolist(), T, max_seqlen)
    longest = None if max_seqlen is None else min(max_seqlen, T)
    return Sequences(cu_seqlens.long().clamp(0, T), T, longest)


def _num_tokens(x: Tensor, dim: int) -> int:
    alone = x.ndim == 2 or (x.ndim == 3 and x.shape[0] == 1)
    if not alone or x.shape[-1] != dim or x.shape[-2] == 0:
        raise ValueError(
            f"x must have shape [tokens, {dim}] or [1, tokens, {dim}] with cu_seqlens, "
            f"and at least one token, got {list(x.shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor, got {x.dtype}")
    return x.shape[-2]


def _check_bounds(bounds: list[int], num_tokens: int, max_seqlen: int | None) -> None:
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens must start at 0, got {bounds[0]}")
    if bounds[-1] != num_tokens:
        raise ValueError(
            f"cu_seqlens must end at the number {num_tokens} of tokens of x, got {bounds[-1]}"
        )
    lengths = [end - start for start, end in pairwise(bounds)]
    if min(lengths) < 0:
        raise ValueError(f"cu_seqlens must not decrease, got a sequence of {min(lengths)} tokens")
    if max_seqlen is not None and max(lengths) > max_seqlen:
        raise ValueError(
            f"max_seqlen must be at least the longest of the sequences, which has {max(lengths)} "
            f"tokens, got {max_seqlen}"
        )


def check_alone(**others: Tensor | None) -> None:
    """Raise where a mask or a context is given along with packed sequences."""
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} {list(value.shape)} does not go with cu_seqlens: packed sequences have no "
                f"padding and no context; pad them and use masks instead"
            )
