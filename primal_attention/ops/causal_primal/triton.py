"""Causal Primal-Attention as a fused op: running means, features and outputs in one walk.

The means are never written. The forward pass leaves the sums before each block of tokens, from
which the backward pass, walking the other way, makes the means again. README.md counts the traffic.

Letters: B batch, N tokens, H heads, P head dim and feature dim, C outputs of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from primal_attention.ops import launch
from primal_attention.ops.causal_primal.sizes import (
    BACKWARD,
    FORWARD,
    block_sums,
    key,
    takes,
)
from primal_attention.ops.causal_primal.triton_walks import (
    backward_walk,
    forward_walk,
)
from primal_attention.ops.launch import Config
from primal_attention.ops.running_mean.triton import segment_sums

__all__ = ["backward", "forward", "takes"]


def forward(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    grams: bool,
) -> tuple[Tensor, ...]:
    """Outputs, Gram matrices of the features of the means, totals, and sums before each block."""
    B, N, H, P = q.shape
    config = FORWARD[key(q, a_e, a_r)]
    segments, mask = launch.divide(q, config.block), launch.mask_bytes(token_mask)
    q, k = launch.contiguous_rows(q), launch.contiguous_rows(k)
    segment_q, segment_k = (segment_sums(z, counts, mask, segments, config) for z in (q, k))
    sizes = _compiled_for(q, a_e, a_r, config)
    out = q.new_empty(B, N, H, sizes["C"])
    totals = launch.float32(q, B, H, P), launch.float32(q, B, H, P)
    sums = block_sums(q, config.block), block_sums(q, config.block)
    parts = [launch.float32(q, B, segments.number, H, P, P) if grams else None for _ in range(2)]
    forward_walk[(B * segments.number * H,)](
        q, k, *launch.contiguous(a_e, a_r, bias, q_before, k_before), counts, mask,
        segment_q, segment_k, out, *parts, *totals, *sums,
        q.stride(), k.stride(), counts.stride(), out.stride(),
        N, H, segments.number, segments.tokens, MAP_Q=map_q, MAP_K=map_k, **sizes,
    )  # fmt: skip
    gram_q, gram_k = (launch.float32(q, 0) if part is None else part.sum(1) for part in parts)
    return out, gram_q, gram_k, *totals, *sums


def backward(
    q: Tensor,
    k: Tensor,
    a_e: Tensor | None,
    a_r: Tensor | None,
    bias: Tensor | None,
    q_before: Tensor | None,
    k_before: Tensor | None,
    counts: Tensor,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    q_sums: Tensor,
    k_sums: Tensor,
    d_out: Tensor | None,
    d_gram_q: Tensor | None,
    d_gram_k: Tensor | None,
    d_q_total: Tensor | None,
    d_k_total: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients of the first seven inputs; the sums before the first token are part of q_sums."""
    B, N, H, P = q.shape
    config = BACKWARD[key(q, a_e, a_r)]
    segments, mask = launch.divide(q, config.block), launch.mask_bytes(token_mask)
    sizes = _compiled_for(q, a_e, a_r, config) | {"MAP_Q": map_q, "MAP_K": map_k}
    sizes["PARTS_OF_GRADIENT"] = launch.PARTS_OF_GRADIENT[q.dtype]
    dq, dk = launch.empty_rows(q), launch.empty_rows(k)
    d_before = launch.float32(q, B, H, P), launch.float32(q, B, H, P)
    partial = B, segments.number, H
    da_e, da_r = (launch.float32(q, *partial, P, sizes["C"]) for _ in range(2))
    d_bias = launch.float32(q, *partial, sizes["C"])
    d_out = q.new_zeros(B, N, H, sizes["C"]) if d_out is None else launch.contiguous_rows(d_out)
    q, k = launch.contiguous_rows(q), launch.contiguous_rows(k)
    grid = (2 * B * segments.number * H,)
    tensors = (
        q, k, *launch.contiguous(a_e, a_r), counts, mask, q_sums, k_sums, d_out,
        *launch.contiguous(d_gram_q, d_gram_k),
        q.stride(), k.stride(), counts.stride(), d_out.stride(),
        N, H, segments.number, segments.tokens,
    )  # fmt: skip
    after: list[Tensor | None] = [None, None]
    if segments.number > 1:
        after = [launch.float32(q, *partial, P), launch.float32(q, *partial, P)]
    outputs = (
        *launch.contiguous(d_q_total, d_k_total), dq, dk, da_e, da_r, d_bias, *d_before,
        dq.stride(), dk.stride(),
    )  # fmt: skip
    if segments.number > 1:
        backward_walk[grid](*tensors, *after, *outputs, ONLY_SUMS=True, **sizes)
    backward_walk[grid](*tensors, *after, *outputs, ONLY_SUMS=False, **sizes)
    weights = (_summed(a, d, (0, 1)) for a, d in ((a_e, da_e), (a_r, da_r)))
    return dq, dk, *weights, _summed(bias, d_bias, (0, 1, 2)), *d_before


def _compiled_for(
    q: Tensor, a_e: Tensor | None, a_r: Tensor | None, config: Config
) -> dict[str, Any]:
    P, a = q.shape[-1], a_e if a_e is not None else a_r
    C = P if a is None else a.shape[-1]
    return {
        "P": P,
        "C": C,
        "WIDTH_P": launch.padded(P),
        "WIDTH_C": launch.padded(C),
        "BLOCK": config.block,
        "PRECISION": launch.PRECISION[q.dtype],
        "PARTS": launch.PARTS[q.dtype],
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _summed(given: Tensor | None, parts: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The gradient of an input from the parts of the programs; empty where there is no input."""
    return parts.new_empty(0) if given is None else parts.sum(axes).to(given.dtype)
