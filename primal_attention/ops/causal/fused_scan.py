"""The causal scan as fused passes: a program carries the state over the blocks of one segment.

Where a sequence has several segments, their moments come first, and the states between them are
running sums of these.

Letters: B batch, N tokens, H heads, P features, V value dim, n tokens of a block.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from primal_attention.ops.causal.eager import ScanInputs
from primal_attention.ops.triton.launch import (
    PRECISION,
    Config,
    Segments,
    contiguous_rows,
    divide,
    empty_rows,
    float32,
    mask_bytes,
    padded,
)
from primal_attention.ops.triton.launcher import launched
from primal_attention.ops.triton.tiles import (
    columns_of,
    features,
    inverse_norms,
    load_rows,
    load_stacked,
    lowered,
    lowered_product,
    pull_back,
    real_tokens,
    scaled,
    sequence_of,
    share_of_tokens,
    store_rows,
    store_stacked,
    walk,
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


def is_scannable(q: Tensor, k: Tensor, values: Tensor) -> bool:
    """Whether the walks are made for these dtypes and sizes."""
    if q.dtype != k.dtype or not {q.dtype, values.dtype} <= set(PRECISION):
        return False
    P, V = padded(q.shape[-1]), padded(values.shape[-1])
    largest = max(key[0] for key in FORWARD if key[1] == PRECISION[q.dtype])
    return max(P, V) <= WIDEST and largest >= P * V


def scan_forward(given: ScanInputs) -> tuple[Tensor, Tensor]:
    """What each token reads, and the state after the last one."""
    q, k, values = (contiguous_rows(x) for x in given[:3])
    (B, N, H, P), V, config = q.shape, values.shape[-1], _config(FORWARD, q, values)
    sizes, segments = _compiled_for(config, q, values), divide(q, config.block)
    mask = mask_bytes(given.token_mask)
    out, final = float32(q, B, N, H, V), float32(q, B, H, P, V)
    moments = _moments(k, values, mask, segments, {**sizes, "FEATURE_MAP": given.map_k})
    forward_walk[(B * segments.number * H,)](
        q, k, values, mask, _prefix(given.state, moments), out, final,
        q.stride(), k.stride(), values.stride(), out.stride(),
        N, H, segments.number, segments.tokens, MAP_Q=given.map_q, MAP_K=given.map_k, **sizes,
    )  # fmt: skip
    return out, final


def scan_backward(
    given: ScanInputs, d_out: Tensor, d_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, values and the state before the first token."""
    q, k, values, d_out = (contiguous_rows(x) for x in (*given[:3], d_out))
    (B, N, H, P), V, config = q.shape, values.shape[-1], _config(BACKWARD, q, values)
    sizes, segments = _compiled_for(config, q, values), divide(q, config.block)
    dq, dk, d_values = (empty_rows(x) for x in (q, k, values))
    d_before = float32(q, B, H, P, V)
    grid, mask = (B * segments.number * H,), mask_bytes(given.token_mask)
    tensors = q, k, values, mask, d_out
    layout = (
        q.stride(), k.stride(), values.stride(), d_out.stride(),
        N, H, segments.number, segments.tokens,
    )  # fmt: skip
    options = {"MAP_Q": given.map_q, "MAP_K": given.map_k, **sizes}
    moments = _moments(k, values, mask, segments, {**sizes, "FEATURE_MAP": given.map_k})
    before = _prefix(given.state, moments)
    queries_walk[grid](*tensors, before, dq, dq.stride(), *layout, **options)
    moments = _moments(q, d_out, mask, segments, {**sizes, "FEATURE_MAP": given.map_q})
    keys_walk[grid](
        *tensors, _suffix(d_state, moments), dk, d_values, d_before,
        dk.stride(), d_values.stride(), *layout, **options,
    )  # fmt: skip
    return dq, dk, d_values, d_before


def _config(configs: dict[tuple[int, str], Config], q: Tensor, values: Tensor) -> Config:
    entries, precision = padded(q.shape[-1]) * padded(values.shape[-1]), PRECISION[q.dtype]
    return configs[min(key for key in configs if key[1] == precision and key[0] >= entries)]


def _compiled_for(config: Config, q: Tensor, values: Tensor) -> dict[str, Any]:
    P, V = q.shape[-1], values.shape[-1]
    return {
        "P": P,
        "V": V,
        "WIDTH_P": padded(P),
        "WIDTH_V": padded(V),
        "BLOCK": config.block,
        "PRECISION": PRECISION[q.dtype],
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }


def _moments(
    z: Tensor, values: Tensor, mask: Tensor | None, segments: Segments, sizes: dict[str, Any]
) -> Tensor | None:
    """The sum of phi v^T over each segment, [B, segments, H, P, V]; None for a single one."""
    if segments.number == 1:
        return None
    B, N, H, P = z.shape
    moments = float32(z, B, segments.number, H, P, sizes["V"])
    segment_moments[(B * segments.number * H,)](
        z, values, mask, moments, z.stride(), values.stride(),
        N, H, segments.number, segments.tokens, **sizes,
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


@triton.jit
def _phi(
    z, stride, start, real,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """Features of a block, [n, P], and 1 / |z|."""
    rows = load_rows(z, start, stride, real, 0, P, WIDTH)
    inverse = inverse_norms(rows, FEATURE_MAP, tl.float32)
    base, factor = features(rows, inverse, real, FEATURE_MAP, tl.float32)
    return tl.where(columns_of(real, P, WIDTH), scaled(base, factor), 0.0), inverse


@triton.jit
def _up_to_itself(matrix, TRANSPOSED: tl.constexpr):
    """Zeros where a query [row] meets a later key [column]; TRANSPOSED: keys are the rows."""
    n = tl.arange(0, matrix.shape[0])
    if TRANSPOSED:
        return tl.where(n[:, None] <= n[None, :], matrix, 0.0)
    else:
        return tl.where(n[:, None] >= n[None, :], matrix, 0.0)


@launched
@triton.jit
def segment_moments(
    z, values, mask, moments, strides, value_strides, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, FEATURE_MAP: tl.constexpr,
):  # fmt: skip
    """The sum of phi v^T over the tokens of each segment."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    z, values = sequence_of(z, strides, b, h), sequence_of(values, value_strides, b, h)
    total = tl.zeros([WIDTH_P, WIDTH_V], tl.float32)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        phi, _ = _phi(z, strides[1], start, real, P, WIDTH_P, BLOCK, FEATURE_MAP)
        rows = load_rows(values, start, value_strides[1], real, 0, V, WIDTH_V)
        v = lowered(rows, PRECISION)
        total = lowered_product(tl.trans(phi), v, total, PRECISION)
    store_stacked(moments, program, total, P, V)


@launched
@triton.jit
def forward_walk(
    q, k, values, mask, before, out, final,
    q_strides, k_strides, value_strides, out_strides, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """Y = tril(Phi_q Phi_k^T) V + Phi_q state, then state + Phi_k^T V."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    values, out = sequence_of(values, value_strides, b, h), sequence_of(out, out_strides, b, h)
    state = load_stacked(before, program, P, V, WIDTH_P, WIDTH_V)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        phi_q, _ = _phi(q, q_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_Q)
        phi_k, _ = _phi(k, k_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_K)
        phi_q, phi_k = lowered(phi_q, PRECISION), lowered(phi_k, PRECISION)
        rows = load_rows(values, start, value_strides[1], real, 0, V, WIDTH_V)
        v = lowered(rows, PRECISION)
        y = lowered_product(phi_q, state, tl.zeros([BLOCK, WIDTH_V], tl.float32), PRECISION)
        scores = lowered_product(
            phi_q, tl.trans(phi_k), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION
        )
        y = lowered_product(_up_to_itself(scores, False), v, y, PRECISION)
        state = lowered_product(tl.trans(phi_k), v, state, PRECISION)
        store_rows(out, y, start, out_strides[1], last, 0, V, WIDTH_V)
    if last == N:
        store_stacked(final, b * H + h, state, P, V)


@launched
@triton.jit
def queries_walk(
    q, k, values, mask, d_out, before, dq, dq_strides,
    q_strides, k_strides, value_strides, d_out_strides, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """dPhi_q = tril(dY V^T) Phi_k + dY state^T, walking forward with the state."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    values, dq = sequence_of(values, value_strides, b, h), sequence_of(dq, dq_strides, b, h)
    d_out = sequence_of(d_out, d_out_strides, b, h)
    state = load_stacked(before, program, P, V, WIDTH_P, WIDTH_V)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, False)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        dy = load_rows(d_out, start, d_out_strides[1], real, 0, V, WIDTH_V)
        dy = lowered(dy, PRECISION)
        rows = load_rows(values, start, value_strides[1], real, 0, V, WIDTH_V)
        v = lowered(rows, PRECISION)
        phi_k, _ = _phi(k, k_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_K)
        phi_k = lowered(phi_k, PRECISION)
        d_scores = lowered_product(dy, tl.trans(v), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION)
        d_phi = lowered_product(
            dy, tl.trans(state), tl.zeros([BLOCK, WIDTH_P], tl.float32), PRECISION
        )
        d_phi = lowered_product(_up_to_itself(d_scores, False), phi_k, d_phi, PRECISION)
        state = lowered_product(tl.trans(phi_k), v, state, PRECISION)
        phi_q, inverse = _phi(q, q_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_Q)
        dz = tl.where(
            real[:, None],
            pull_back(phi_q, tl.full([BLOCK], 1.0, tl.float32), inverse, d_phi, MAP_Q),
            0.0,
        )
        store_rows(dq, dz, start, dq_strides[1], last, 0, P, WIDTH_P)


@launched
@triton.jit
def keys_walk(
    q, k, values, mask, d_out, after, dk, d_values, d_before,
    dk_strides, d_value_strides,
    q_strides, k_strides, value_strides, d_out_strides, N, H, number, tokens,
    P: tl.constexpr, V: tl.constexpr, WIDTH_P: tl.constexpr, WIDTH_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MAP_Q: tl.constexpr, MAP_K: tl.constexpr,
):  # fmt: skip
    """dPhi_k and dV from tril^T and the suffix R, walking backward; then R + Phi_q^T dY."""
    program = tl.program_id(0)
    b, h, first, last = share_of_tokens(program, N, H, number, tokens)
    q, k = sequence_of(q, q_strides, b, h), sequence_of(k, k_strides, b, h)
    values, dk = sequence_of(values, value_strides, b, h), sequence_of(dk, dk_strides, b, h)
    d_values = sequence_of(d_values, d_value_strides, b, h)
    d_out = sequence_of(d_out, d_out_strides, b, h)
    suffix = load_stacked(after, program, P, V, WIDTH_P, WIDTH_V)
    for step in tl.range(0, tl.cdiv(last - first, BLOCK), num_stages=STAGES):
        start = walk(first, last, step, BLOCK, True)
        real = real_tokens(mask, b, N, start, last, BLOCK)
        dy = load_rows(d_out, start, d_out_strides[1], real, 0, V, WIDTH_V)
        dy = lowered(dy, PRECISION)
        rows = load_rows(values, start, value_strides[1], real, 0, V, WIDTH_V)
        v = lowered(rows, PRECISION)
        phi_q, _ = _phi(q, q_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_Q)
        phi_q = lowered(phi_q, PRECISION)
        d_scores = lowered_product(v, tl.trans(dy), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION)
        d_phi = lowered_product(
            v, tl.trans(suffix), tl.zeros([BLOCK, WIDTH_P], tl.float32), PRECISION
        )
        d_phi = lowered_product(_up_to_itself(d_scores, True), phi_q, d_phi, PRECISION)
        phi_k, inverse = _phi(k, k_strides[1], start, real, P, WIDTH_P, BLOCK, MAP_K)
        dz = tl.where(
            real[:, None],
            pull_back(phi_k, tl.full([BLOCK], 1.0, tl.float32), inverse, d_phi, MAP_K),
            0.0,
        )
        store_rows(dk, dz, start, dk_strides[1], last, 0, P, WIDTH_P)
        scores = lowered_product(
            phi_k, tl.trans(phi_q), tl.zeros([BLOCK, BLOCK], tl.float32), PRECISION
        )
        dv = lowered_product(phi_k, suffix, tl.zeros([BLOCK, WIDTH_V], tl.float32), PRECISION)
        dv = lowered_product(_up_to_itself(scores, True), dy, dv, PRECISION)
        suffix = lowered_product(tl.trans(phi_q), dy, suffix, PRECISION)
        store_rows(d_values, dv, start, d_value_strides[1], last, 0, V, WIDTH_V)
    if first == 0:
        store_stacked(d_before, b * H + h, suffix, P, V)
