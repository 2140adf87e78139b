"""Packed sequences: all of them one after the other, with no padding between.

Sequence b has the tokens from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Work that no sequence
shares with another runs on padded copies, which are made and taken apart on the device.

Letters: B sequences, T tokens of all of them, L tokens of the longest.
"""

from itertools import pairwise

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import Compaction, padded


def padding_of(x: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, dim: int) -> Compaction:
    """Pad the sequences packed in x to an upper bound of their lengths, ``max_seqlen``.

    If it is None, the longest length is read, which synchronises. Bounds are checked on CPU only.
    """
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
    bounds = cu_seqlens.long().clamp(0, T)
    if max_seqlen is not None:
        longest = min(max_seqlen, T)
    elif torch.compiler.is_compiling():
        raise ValueError("max_seqlen must be given under torch.compile, got None")
    else:
        longest = int(bounds.diff().max())
    return padded(bounds, T, longest)


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
