"""For which tensors the op has a fused form, and in which blocks that walks.

Letters: B batch, N tokens, H heads, P features, S directions, V outputs of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.gpu import has_fused_maps, uses_fused
from primal_attention.ops.launch import Config

# By the largest padded width and the arithmetic of products. Both passes walk over the same blocks:
# the states that the forward pass leaves are those before each of them. With three stages the next
# block is read while one is worked on, where two programs of a multiprocessor have room for both.
FORWARD = {
    (32, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (64, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (128, "bf16"): Config(block=32, num_warps=8, num_stages=1),
    (32, "tf32"): Config(block=32, num_warps=4, num_stages=2),
    (64, "tf32"): Config(block=32, num_warps=8, num_stages=1),
    (32, "ieee"): Config(block=32, num_warps=4, num_stages=1),
    (64, "ieee"): Config(block=16, num_warps=8, num_stages=1),
}
BACKWARD = {
    **FORWARD,
    (32, "bf16"): Config(block=64, num_warps=4, num_stages=2),
    (64, "bf16"): Config(block=64, num_warps=4, num_stages=2),
}
SUMS = FORWARD  # of segments
_STATES = {torch.bfloat16: torch.bfloat16}  # as the products take them; else float32


def dims(q: Tensor, h: Tensor, c_e: Tensor | None, c_r: Tensor | None) -> tuple[int, int, int]:
    """P, S and V."""
    c = c_e if c_e is not None else c_r
    assert c is not None, "one of c_e and c_r must be given"
    return q.shape[-1], h.shape[-1], c.shape[-1]


def key(q: Tensor, h: Tensor, c_e: Tensor | None, c_r: Tensor | None) -> tuple[int, str]:
    """Where the tables have the sizes for these tensors."""
    return key_of(q.dtype, *dims(q, h, c_e, c_r))


def key_of(dtype: torch.dtype, *widths: int) -> tuple[int, str]:
    """The same by the dtype of the queries, and P, S and V."""
    return max(launch.padded(max(widths)), 32), launch.PRECISION.get(dtype, "")


def score_stages(where: tuple[int, str], directions: int) -> int:
    """Of the programs for scores, which keep less: few directions leave room for a stage more."""
    more = where == (64, "bf16") and directions <= 32
    return BACKWARD[where].num_stages + more


def takes(
    q: Tensor, k: Tensor, h: Tensor, c_e: Tensor | None, c_r: Tensor | None, *options: Any
) -> bool:
    """Whether the fused form is made for these dtypes, sizes and maps."""
    _, _, _, _, _, map_q, map_k, *_ = options
    dtypes, sizes = q.dtype == k.dtype and h.dtype in launch.PRECISION, dims(q, h, c_e, c_r)
    return dtypes and takes_sizes(q.dtype, *sizes, map_q, map_k) and q.numel() > 0


def takes_sizes(dtype: torch.dtype, P: int, S: int, V: int, map_q: str, map_k: str) -> bool:
    """Whether it is for this dtype of the queries, these widths and these maps.

    The assembler of Triton 3.6 compiles the walks wrongly for heads in bfloat16 of more than 32 and
    less than 64 columns, and of 64 with some maps: products of them read anywhere.
    """
    where = key_of(dtype, P, S, V)
    if where != (64, "bf16"):
        return where in FORWARD
    return P == V == 64 and "relu" not in (map_q, map_k) and (map_q == "elu") == (map_k == "elu")


def is_fused(q: Tensor, *rest: Any) -> bool:
    """Whether the op runs in its fused form on the tensors' device."""
    return q.is_cuda and uses_fused() and has_fused_maps(*rest) and takes(q, *rest)


def fused_states(q: Tensor, h: Tensor, block: int) -> Tensor:
    """Room for the sums before each block, [B, blocks, H, 2, P, S]: q_side and k_side."""
    B, N, H, P = q.shape
    shape = B, -(-N // block), H, 2, P, h.shape[-1]
    return q.new_empty(shape, dtype=_STATES.get(q.dtype, torch.float32))
