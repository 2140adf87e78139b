"""The causal scan in pieces of the sequence, linear in its length, with its own backward pass.

Inside a piece the kernel matrix is small and dense; between pieces only the state is carried. The
backward pass walks forward once for the queries (prefix state S) and backward once for the keys and
values (suffix state R). README.md derives it.

Letters: B batch, N tokens, H heads, C head dim, P features, S dual variables, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import head_first, mask_of, slices, zeroed
from primal_attention.ops.flops import Call
from primal_attention.ops.gradients import (
    are_differentiated,
    differentiable_gradients,
    with_options,
)
from primal_attention.ops.launch import empty_rows
from primal_attention.ops.op import Op
from primal_attention.ops.scan.reference import ScanResult
from primal_attention.precision import accumulate, accumulation_dtype, exact

_PIECE = 128  # tokens: the dense part costs this many times N, the state once for each piece


def scan(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, N, H, C]
    values: Tensor,  # [B, N, H, V], or [B, N, H, S] with a value map
    value_map: Tensor | None = None,  # [S, V]
    state: Tensor | None = None,  # [B, H, P, V]: the sum over earlier tokens
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> ScanResult:
    """The same values as the reference."""
    return ScanResult(*_forward(q, k, values, value_map, state, token_mask, map_q, map_k))


class _Pieces:
    """Features and values of one piece at a time, [B, H, n, P] and [B, H, n, V]."""

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
        token_mask: Tensor | None,
        maps: tuple[str, str],
    ):
        self.q, self.k, self.values, value_map = inputs
        self.value_map = None if value_map is None else accumulate(value_map)
        self.token_mask = token_mask
        self.map_q, self.map_k = (FIXED_MAPS[name] for name in maps)
        self.slices = list(slices(self.q.shape[1], _PIECE))

    def mask(self, piece: slice) -> Tensor | None:
        return mask_of(self.token_mask, piece)

    def __call__(self, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        phi_q = zeroed(self.map_q.forward(head_first(self.q, piece)), self.mask(piece))
        phi_k = zeroed(self.map_k.forward(head_first(self.k, piece)), self.mask(piece))
        values = self.raw_values(piece)
        return phi_q, phi_k, values if self.value_map is None else values @ self.value_map

    def raw_values(self, piece: slice) -> Tensor:
        return zeroed(head_first(self.values, piece), self.mask(piece))


@exact
def forward_in_pieces(
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
    pieces = _Pieces((q, k, values, value_map), token_mask, (map_q, map_k))
    out, prefix = _empty_outputs(q, k, values, value_map)
    prefix.zero_() if state is None else prefix.copy_(state)
    for piece in pieces.slices:
        phi_q, phi_k, v = pieces(piece)
        inside = (phi_q @ phi_k.mT).tril() @ v
        out[:, piece] = (inside + phi_q @ prefix).transpose(1, 2)
        prefix += phi_k.mT @ v
    return out, prefix


def _empty_outputs(
    q: Tensor, k: Tensor, values: Tensor, value_map: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    B, N, H, P = q.shape
    V = (values if value_map is None else value_map).shape[-1]
    dtype = accumulation_dtype(q.dtype)
    return q.new_empty((B, N, H, V), dtype=dtype), q.new_empty((B, H, P, V), dtype=dtype)


@exact
def backward_in_pieces(
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
    """Gradients of q, k, values, value_map and state; empty where there is no value map."""
    pieces = _Pieces((q, k, values, value_map), token_mask, (map_q, map_k))
    dq, dk, d_values, d_map, prefix = _empty_gradients(q, k, values, value_map)
    prefix.zero_() if state is None else prefix.copy_(state)
    for piece in pieces.slices:
        phi_q, phi_k, v = pieces(piece)
        dy = head_first(d_out, piece)
        d_phi = (dy @ v.mT).tril() @ phi_k + dy @ prefix.mT
        dq_piece = pieces.map_q.vjp(head_first(q, piece), d_phi)
        dq[:, piece] = zeroed(dq_piece, pieces.mask(piece)).transpose(1, 2)
        prefix += phi_k.mT @ v
    d_map.zero_()
    suffix = d_state.clone(memory_format=torch.contiguous_format)
    for piece in reversed(pieces.slices):
        phi_q, phi_k, v = pieces(piece)
        dy = head_first(d_out, piece)
        d_phi = (dy @ v.mT).tril().mT @ phi_q + v @ suffix.mT
        dk_piece = pieces.map_k.vjp(head_first(k, piece), d_phi)
        dk[:, piece] = zeroed(dk_piece, pieces.mask(piece)).transpose(1, 2)
        dv = (phi_q @ phi_k.mT).tril().mT @ dy + phi_k @ suffix
        if pieces.value_map is not None:
            d_map += (pieces.raw_values(piece).mT @ dv).sum((0, 1))
            dv = dv @ pieces.value_map.mT
        d_values[:, piece] = dv.transpose(1, 2)
        suffix += phi_q.mT @ dy
    return dq, dk, d_values, d_map, suffix


def _empty_gradients(
    q: Tensor, k: Tensor, values: Tensor, value_map: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, state = _empty_outputs(q, k, values, value_map)
    dq, dk, d_values = (empty_rows(x) for x in (q, k, values))
    d_map = q.new_empty(0) if value_map is None else empty_rows(value_map)
    return dq, dk, d_values, d_map, state


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.map_q, ctx.map_k = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_out: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, token_mask = ctx.saved_tensors
    grads: list[Tensor | None]
    if are_differentiated():
        options = token_mask, ctx.map_q, ctx.map_k
        whole = with_options(_composition, *options)
        grads = differentiable_gradients(whole, tensors, [d_out, d_state])
    else:
        computed = _backward(*tensors, token_mask, ctx.map_q, ctx.map_k, d_out, d_state)
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, None, None, None)


@exact
def _composition(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    value_map: Tensor | None,
    state: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> tuple[Tensor, Tensor]:
    """The forward pass by operations that have derivatives."""
    pieces = _Pieces((q, k, values, value_map), token_mask, (map_q, map_k))
    outputs, prefix = [], state
    for piece in pieces.slices:
        phi_q, phi_k, v = pieces(piece)
        read = (phi_q @ phi_k.mT).tril() @ v
        outputs.append(read if prefix is None else read + phi_q @ prefix)
        moment = phi_k.mT @ v
        prefix = moment if prefix is None else prefix + moment
    assert prefix is not None
    return torch.cat(outputs, 2).transpose(1, 2), prefix


_forward = Op(
    "scan_forward",
    forward_in_pieces,
    _empty_outputs,
    fused="primal_attention.ops.scan.triton.forward",
    gradients=_gradients,
    save=_save,
    composition=_composition,
)
_backward = Op(
    "scan_backward",
    backward_in_pieces,
    _empty_gradients,
    fused="primal_attention.ops.scan.triton.backward",
    backward_of=(_composition, lambda *t: Call(t[:8], t[8:])),
)
