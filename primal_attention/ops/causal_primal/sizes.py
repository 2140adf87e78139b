"""For which tensors causal Primal-Attention has a fused form, and in which blocks that walks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.gpu import uses_fused
from primal_attention.ops.launch import Config

# By the padded width of a head and the arithmetic of products. Both passes walk over the same
# blocks: the sums that the forward pass leaves are those before each of them.
FORWARD = {
    (16, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (32, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (64, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (128, "bf16"): Config(block=32, num_warps=8, num_stages=2),
    (16, "tf32"): Config(block=64, num_warps=4, num_stages=2),
    (32, "tf32"): Config(block=32, num_warps=4, num_stages=2),
    (64, "tf32"): Config(block=32, num_warps=8, num_stages=2),
    (16, "ieee"): Config(block=32, num_warps=4, num_stages=2),
    (32, "ieee"): Config(block=32, num_warps=8, num_stages=2),
    (64, "ieee"): Config(block=16, num_warps=8, num_stages=2),
}
BACKWARD = {
    **FORWARD,
    (16, "bf16"): Config(block=64, num_warps=4, num_stages=2),
    (32, "bf16"): Config(block=64, num_warps=4, num_stages=2),
    (64, "bf16"): Config(block=64, num_warps=4, num_stages=2),
}


def key(q: Tensor, a_e: Tensor | None, a_r: Tensor | None) -> tuple[int, str]:
    """Where the tables have the sizes for these tensors."""
    widths = [q.shape[-1], *(a.shape[-1] for a in (a_e, a_r) if a is not None)]
    return launch.padded(max(widths)), launch.PRECISION.get(q.dtype, "")


def takes(q: Tensor, k: Tensor, a_e: Tensor | None, a_r: Tensor | None, *options: Any) -> bool:
    """Whether the fused form is made for these dtypes and sizes."""
    return q.dtype == k.dtype and key(q, a_e, a_r) in FORWARD and q.numel() > 0


def is_fused(q: Tensor, k: Tensor, a_e: Tensor | None, a_r: Tensor | None) -> bool:
    """Whether the op runs in its fused form on the tensors' device."""
    return q.is_cuda and uses_fused() and takes(q, k, a_e, a_r)


def block_sums(q: Tensor, block: int) -> Tensor:
    """Room for the sums before each block, [B, blocks, H, C]."""
    B, N, H, C = q.shape
    return launch.float32(q, B, -(-N // block), H, C)
