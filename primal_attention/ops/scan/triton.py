"""The causal scan as fused ops: a program carries the state over the blocks of one segment.

Where a sequence has several segments, their moments come first, and the states between them are
running sums of these.

Letters: B batch, N tokens, H heads, P features, S dual variables, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.launch import Config, Segments
from primal_attention.ops.scan.triton_walks import (
    forward_walk,
    keys_walk,
    queries_walk,
    segment_moments,
)

# By the padded number of entries of the state, at most, and the arithmetic of products.
FORWARD = {
    (32 * 32, "bf16"): Config(block=64, num_warps=4, num_stages=3),
    (64 * 64, "bf16"): Config(block=64, num_warps=4, num_stages=2),
    (128 * 128, "bf16"): Config(block=32, num_warps=8, num_stages=2),
    (32 * 32, "tf32"): Config(block=32, num_warps=4, num_stages=2),
    (64 * 64, "tf32"): Config(block=32, num_warps=8, num_stages=2),
    (128 * 128, "tf32"): Config(block=16, num_warps=8, num_stages=1),
    (32 * 32, "ieee"): Config(block=32, num_warps=4, num_stages=2),
    (64 * 64, "ieee"): Config(block=16, num_warps=8, num_stages=2),
}
BACKWARD = {
    **FORWARD,
    (64 * 64, "bf16"): Config(block=32, num_warps=4, num_stages=2),
    (128 * 128, "bf16"): Config(block=16, num_warps=8, num_stages=2),
    (32 * 32, "ieee"): Config(block=16, num_warps=4, num_stages=2),
}
WIDEST = 256


def takes(
    q: Tensor, k: Tensor, values: Tensor, value_map: Tensor | None = None, *options: Any
) -> bool:
    """Whether the fused ops are made for these dtypes and sizes."""
    known = q.dtype == k.dtype and {q.dtype, values.dtype} <= set(launch.PRECISION)
    if not known or not q.numel():
        return False
    P, S, V = (launch.padded(x) for x in _dims(q, values, value_map))
    largest = max(key[0] for key in FORWARD if key[1] == launch.PRECISION[q.dtype])
    return max(P, S, V) <= WIDEST and largest >= P * V


def forward(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    value_map: Tensor | None,
    state: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> tuple[Tensor, Tensor]:
    """What each token reads, and the state after the last one."""
    (B, N, H, P), (_, _, V) = q.shape, _dims(q, values, value_map)
    config = _config(FORWARD, q, values, value_map)
    sizes = _compiled_for(config, q, values, value_map)
    segments, mask = launch.divide(q, config.block), launch.mask_bytes(token_mask)
    q, k, values = (launch.contiguous_rows(x) for x in (q, k, values))
    [value_map] = launch.contiguous(value_map)
    out, final = launch.float32(q, B, N, H, V), launch.float32(q, B, H, P, V)
    moments = _moments(k, values, value_map, mask, segments, sizes, map_k)
    forward_walk[(B * segments.number * H,)](
        q, k, values, value_map, mask, _prefix(state, moments), out, final,
        q.stride(), k.stride(), values.stride(), out.stride(),
        N, H, segments.number, segments.tokens, MAP_Q=map_q, MAP_K=map_k, **sizes,
    )  # fmt: skip
    return out, final


def backward(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    value_map: Tensor | None,
    state: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor,
    d_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, values, value_map and the state before the first token."""
    (B, N, H, P), (_, S, V) = q.shape, _dims(q, values, value_map)
    config = _config(BACKWARD, q, values, value_map)
    sizes = _compiled_for(config, q, values, value_map)
    segments, mask = launch.divide(q, config.block), launch.mask_bytes(token_mask)
    q, k, values, d_out = (launch.contiguous_rows(x) for x in (q, k, values, d_out))
    [value_map] = launch.contiguous(value_map)
    dq, dk, d_values = (launch.empty_rows(x) for x in (q, k, values))
    d_before = launch.float32(q, B, H, P, V)
    d_map = None if value_map is None else launch.float32(q, B, segments.number, H, S, V)
    grid = (B * segments.number * H,)
    tensors = q, k, values, value_map, mask, d_out
    layout = (
        q.stride(), k.stride(), values.stride(), d_out.stride(),
        N, H, segments.number, segments.tokens,
    )  # fmt: skip
    options = {"MAP_Q": map_q, "MAP_K": map_k, **sizes}
    moments = _moments(k, values, value_map, mask, segments, sizes, map_k)
    before = _prefix(state, moments)
    queries_walk[grid](*tensors, before, dq, dq.stride(), *layout, **options)
    sizes |= {"S": V, "WIDTH_S": launch.padded(V)}
    after = _suffix(d_state, _moments(q, d_out, None, mask, segments, sizes, map_q))
    keys_walk[grid](
        *tensors, after, dk, d_values, d_map, d_before, dk.stride(), d_values.stride(), *layout,
        **options,
    )  # fmt: skip
    if value_map is None or d_map is None:
        return dq, dk, d_values, q.new_empty(0), d_before
    return dq, dk, d_values, d_map.sum((0, 1, 2)).to(value_map.dtype), d_before


def _dims(q: Tensor, values: Tensor, value_map: Tensor | None) -> tuple[int, int, int]:
    """P, S and V."""
    mapped = values if value_map is None else value_map
    return q.shape[-1], values.shape[-1], mapped.shape[-1]


def _config(
    configs: dict[tuple[int, str], Config], q: Tensor, values: Tensor, value_map: Tensor | None
) -> Config:
    P, _, V = (launch.padded(x) for x in _dims(q, values, value_map))
    precision = launch.PRECISION[q.dtype]
    return configs[min(key for key in configs if key[1] == precision and key[0] >= P * V)]


def _compiled_for(
    config: Config, q: Tensor, values: Tensor, value_map: Tensor | None
) -> dict[str, Any]:
    sizes: dict[str, Any] = dict(zip("PSV", _dims(q, values, value_map), strict=True))
    widths = {f"WIDTH_{name}": launch.padded(size) for name, size in sizes.items()}
    rest = {"PRECISION": launch.PRECISION[q.dtype], "STAGES": config.num_stages}
    return {**sizes, **widths, "BLOCK": config.block, **rest, "num_warps": config.num_warps}


def _moments(
    z: Tensor,
    values: Tensor,
    value_map: Tensor | None,
    mask: Tensor | None,
    segments: Segments,
    sizes: dict[str, Any],
    feature_map: str,
) -> Tensor | None:
    """The sum of phi v^T over each segment, [B, segments, H, P, V]; None for a single one."""
    if segments.number == 1:
        return None
    B, N, H, P = z.shape
    moments = launch.float32(z, B, segments.number, H, P, sizes["V"])
    segment_moments[(B * segments.number * H,)](
        z, values, value_map, mask, moments, z.stride(), values.stride(),
        N, H, segments.number, segments.tokens, FEATURE_MAP=feature_map, **sizes,
    )  # fmt: skip
    return moments


def _prefix(state: Tensor | None, moments: Tensor | None) -> Tensor | None:
    """The state before each segment, [B, segments, H, P, V]; None where it is zero."""
    if moments is None:
        return None if state is None else state.contiguous()
    first = torch.zeros_like(moments[:, :1]) if state is None else state[:, None]
    return torch.cat([first, moments[:, :-1]], dim=1).cumsum(1)


def _suffix(d_state: Tensor, moments: Tensor | None) -> Tensor:
    """What the tokens after each segment pass to its keys and values."""
    if moments is None:
        return d_state.contiguous()
    return torch.cat([d_state[:, None], moments[:, 1:].flip(1)], dim=1).cumsum(1).flip(1)
