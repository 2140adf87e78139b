"""The sampled weights as fused ops: one launch forward, three backward.

Letters: B batch, N tokens, D model dim, H heads, C head dim, P feature dim, S directions,
M landmarks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton.language as tl
from einops import rearrange
from torch import Tensor

from primal_attention.ops.launch import padded
from primal_attention.ops.sampled.triton_blocks import (
    BLOCK_OF_C,
    BLOCK_OF_W,
    add_up_blocks,
    parameter_blocks,
    token_blocks,
    weight_blocks,
)
from primal_attention.ops.triton_launch import (
    Config,
    contiguous,
    device_of,
    readable,
    shares_of,
    strides,
    writable,
)

# The dtype of the products. The range of float16 is too short for the sums over landmarks.
DOTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float32,
    torch.float32: tl.float32,
}
# Of blocks of tokens; tiles are rows of W.
CONFIGS = {
    torch.bfloat16: Config(block=64, tile=64, num_warps=4, num_stages=2),
    torch.float16: Config(block=32, tile=32, num_warps=4, num_stages=1),
    torch.float32: Config(block=32, tile=32, num_warps=4, num_stages=1),
}
LANDMARKS = {torch.bfloat16: 64, torch.float16: 32, torch.float32: 32}  # of a block
_NEARBY = 32  # landmarks of a block among those of a few tokens
_SHORTEST = 4  # sequences of a group, so that its sums are small beside them


def takes(x: Tensor, index: Tensor, w_e: Tensor, w_r: Tensor, *rest: Any) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    _, M, S = w_e.shape
    dtypes = all(each is None or each.dtype in DOTS for each in (x, w_e, w_r, *rest[:2]))
    return dtypes and w_r.dtype == w_e.dtype and S <= 128 and M <= 4096 and x.numel() * M > 0


class _Sizes(NamedTuple):
    """What the fused ops are compiled for."""

    H: int
    M: int
    P: int
    S: int
    C: int
    config: Config

    @property
    def tile(self) -> int:
        return min(padded(self.P), self.config.tile if self.S <= 64 else 16)

    @property
    def tiles(self) -> int:
        return -(-self.P // self.tile)

    @property
    def columns(self) -> int:
        return min(padded(self.C), 32)


def _sizes(x: Tensor, w_e: Tensor, c_e: Tensor | None, c_r: Tensor | None) -> _Sizes:
    H, M, S = w_e.shape
    C = max(0 if c is None else c.shape[1] for c in (c_e, c_r))
    return _Sizes(H, M, x.shape[2] // H, S, C, CONFIGS[x.dtype])


def forward(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_e, W_r, A_e and A_r; empty where they are not wanted."""
    sizes = _sizes(x, w_e, c_e, c_r)
    B, (H, M, P, S, C, config) = x.shape[0], sizes
    e, r = (x.new_empty((B, H, P, S), dtype=torch.float32) for _ in range(2))
    a_e, a_r = (x.new_empty(0) if c is None else e.new_empty((B, H, P, C)) for c in (c_e, c_r))
    rows = readable(rearrange(x, "b n (h p) -> b n h p", h=H))
    with device_of(x):
        weight_blocks[(B * H, sizes.tiles)](
            rows, index.contiguous(), *contiguous(w_e, w_r), c_e, c_r, e, r, a_e, a_r,
            strides(rows), _map_strides(c_e), _map_strides(c_r), H, scale,
            M, P, S, C, DOTS[x.dtype],
            LANDMARKS[x.dtype], sizes.tile, padded(S), sizes.columns, **config.launch,
        )  # fmt: skip
    return e, r, a_e, a_r


def _map_strides(c: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if c is None else c.stride()


def backward(
    x: Tensor,
    index: Tensor,
    w_e: Tensor,
    w_r: Tensor,
    c_e: Tensor | None,
    c_r: Tensor | None,
    scale: float,
    e: Tensor,
    r: Tensor,
    d_e: Tensor | None,
    d_r: Tensor | None,
    da_e: Tensor | None,
    da_r: Tensor | None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, w_e, w_r, c_e and c_r; empty where there is no such input."""
    sizes = _sizes(x, w_e, c_e, c_r)
    if config is not None:
        sizes = sizes._replace(config=config)
    grads = [None if each is None else torch.empty_like(each) for each in (x, w_e, w_r, c_e, c_r)]
    index, dx = index.contiguous(), grads[0]
    assert dx is not None
    given = contiguous(w_e, w_r), (c_e, c_r), contiguous(e, r, d_e, d_r, da_e, da_r)
    totals, c_parts = _pull_back(index, *given, scale, dx, sizes)
    w_parts = _parameter_parts(x, index, totals, sizes)
    _add_up(w_parts, c_parts, grads[1:], sizes)
    dx, dw_e, dw_r, dc_e, dc_r = (x.new_empty(0) if grad is None else grad for grad in grads)
    return dx, dw_e, dw_r, dc_e, dc_r


def _pull_back(
    index: Tensor,
    parameters: list[Tensor | None],
    maps: tuple[Tensor | None, Tensor | None],
    given: list[Tensor | None],  # e, r, and the gradients of e, r, a_e, a_r
    scale: float,
    dx: Tensor,
    sizes: _Sizes,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Gradients of W_e and W_r by all of their uses, and parts of those of C_e and C_r.

    The gradient of x is written.
    """
    (B, N, _), (H, M, P, S, C, config) = dx.shape, sizes
    e, *_, da_e, da_r = given
    assert e is not None
    totals = [torch.empty_like(e) for _ in range(2)]
    c_parts = [
        None if da is None else e.new_empty((B * H * sizes.tiles, S, C)) for da in (da_e, da_r)
    ]
    c_e, c_r = maps
    by_head = rearrange(dx, "b n (h p) -> b n h p", h=H)
    shares = shares_of(by_head, config)
    with writable(by_head) as d_rows, device_of(dx):
        token_blocks[(shares.programs, sizes.tiles)](
            index, *parameters, c_e, c_r, *given, *totals, *c_parts, d_rows,
            _map_strides(c_e), _map_strides(c_r), strides(d_rows),
            N, H, shares.splits, shares.tokens, scale, M, P, S, C, DOTS[dx.dtype],
            config.block, _NEARBY, padded(M), sizes.tile, padded(S), sizes.columns,
            **config.launch,
        )  # fmt: skip
    return totals, c_parts


def _parameter_parts(x: Tensor, index: Tensor, totals: list[Tensor], sizes: _Sizes) -> list[Tensor]:
    """Gradients of w_e and w_r, [groups, H, M, S], each summed over a group of sequences."""
    B, (H, M, P, S, _, config) = x.shape[0], sizes
    block = LANDMARKS[x.dtype]
    blocks = H * -(-M // block)
    group = max(_SHORTEST, -(-B * blocks // config.programs))
    groups = -(-B // group)
    parts = [totals[0].new_empty((groups, H, M, S)) for _ in range(2)]
    rows = readable(rearrange(x, "b n (h p) -> b n h p", h=H))
    with device_of(x):
        parameter_blocks[(blocks, groups)](
            rows, index, *totals, *parts, strides(rows), B, H, group,
            M, P, S, DOTS[x.dtype], block, sizes.tile, padded(S), **config.launch,
        )  # fmt: skip
    return parts


def _add_up(
    w_parts: list[Tensor],
    c_parts: list[Tensor | None],
    grads: list[Tensor | None],  # of w_e, w_r, c_e and c_r, written
    sizes: _Sizes,
) -> None:
    """The gradients of the parameters from their parts."""
    H, M, _, S, C, _ = sizes
    dw_e, dw_r, dc_e, dc_r = grads
    for grad, part in zip((dc_e, dc_r), c_parts, strict=True):
        if grad is not None and part is None:
            grad.zero_()
    matrices = max(0 if part is None else part.shape[0] for part in c_parts)
    blocks = -(-H * M * S // BLOCK_OF_W.value) + -(-S * C // BLOCK_OF_C.value)
    with _contiguous(dw_e) as d_e, _contiguous(dw_r) as d_r, device_of(w_parts[0]):
        add_up_blocks[(blocks, 2)](
            *w_parts, *c_parts, d_e, d_r, dc_e, dc_r, _map_strides(dc_e), _map_strides(dc_r),
            w_parts[0].shape[0], matrices, H * M * S, S, C, num_warps=4,
        )  # fmt: skip


@contextmanager
def _contiguous(grad: Tensor | None) -> Iterator[Tensor]:
    """The gradient, or a contiguous tensor of its shape that is copied into it on leaving."""
    assert grad is not None
    written = grad if grad.is_contiguous() else grad.new_empty(grad.shape)
    yield written
    if written is not grad:
        grad.copy_(written)
