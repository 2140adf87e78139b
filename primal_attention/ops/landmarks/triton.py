"""The positions of the landmarks as a fused op: one launch, the same integers.

Letters: B batch, N tokens, M landmarks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops.gpu import device_of
from primal_attention.ops.landmarks.triton_blocks import index_blocks
from primal_attention.ops.launch import mask_bytes
from primal_attention.ops.triton_launch import contiguous

_BLOCK_M, _BLOCK_N = 32, 256


def takes(x: Tensor, *options: Any) -> bool:
    """Whether there is anything to do."""
    return x.shape[0] > 0


def landmark_index(
    x: Tensor,
    token_mask: Tensor | None,
    moves: Tensor | None,
    drops: Tensor | None,
    num_landmarks: int,
    jitter: float,
    dropout: float,
) -> Tensor:
    """The position of each landmark, [B, M]; -1 where there is none."""
    B, N, _ = x.shape
    index = x.new_empty((B, num_landmarks), dtype=torch.long)
    moves, drops = contiguous(moves, drops)
    with device_of(x):
        index_blocks[(B, -(-num_landmarks // _BLOCK_M))](
            mask_bytes(token_mask), moves, drops, index, N, num_landmarks, jitter, dropout,
            _BLOCK_M, _BLOCK_N, num_warps=4,
        )  # fmt: skip
    return index
