"""The causal scan in pieces of the sequence, linear in its length, with its own backward pass.

Inside a piece the kernel matrix is small and dense; between pieces only the state is carried. The
backward pass walks forward once for the queries (prefix state S) and backward once for the keys and
values (suffix state R). README.md derives it.

Letters: B batch, N tokens, H heads, C head dim, P features, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum
from torch import Tensor

from primal_attention.feature_maps import FIXED_MAPS
from primal_attention.ops.chunks import masked
from primal_attention.ops.gradients import differentiable_gradients
from primal_attention.ops.scan import reference
from primal_attention.ops.scan.reference import ScanResult
from primal_attention.precision import accumulate, accumulation_dtype, exact

_PIECE = 64  # tokens: the dense part costs this many times N, the state once for each piece


def scan(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, N, H, C]
    values: Tensor,  # [B, N, H, V]
    state: Tensor | None = None,  # [B, H, P, V]: the sum over earlier tokens
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token
    map_q: str = "cosine",
    map_k: str = "cosine",
) -> ScanResult:
    """The same values as the reference."""
    return ScanResult(*_forward(q, k, values, state, token_mask, map_q, map_k))


class _Pieces:
    """Features and values of one piece at a time."""

    def __init__(
        self, q: Tensor, k: Tensor, values: Tensor, token_mask: Tensor | None, maps: tuple[str, str]
    ):
        self.q, self.k, self.values, self.token_mask = q, k, values, token_mask
        self.map_q, self.map_k = (FIXED_MAPS[name] for name in maps)
        self.slices = [
            slice(start, min(start + _PIECE, q.shape[1])) for start in range(0, q.shape[1], _PIECE)
        ]

    def mask(self, piece: slice) -> Tensor | None:
        return None if self.token_mask is None else self.token_mask[:, piece]

    def __call__(self, piece: slice) -> tuple[Tensor, Tensor, Tensor]:
        phi_q = masked(self.map_q.forward(accumulate(self.q[:, piece])), self.mask(piece))
        phi_k = masked(self.map_k.forward(accumulate(self.k[:, piece])), self.mask(piece))
        return phi_q, phi_k, accumulate(self.values[:, piece])


def _initial(q: Tensor, values: Tensor, state: Tensor | None) -> Tensor:
    B, _, H, P = q.shape
    shape, dtype = (B, H, P, values.shape[-1]), accumulation_dtype(q.dtype)
    return q.new_zeros(shape, dtype=dtype) if state is None else state.to(dtype, copy=True)


@torch.library.custom_op("primal_attention::scan_forward", mutates_args=())
@exact
def _forward(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    state: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
) -> tuple[Tensor, Tensor]:
    pieces = _Pieces(q, k, values, token_mask, (map_q, map_k))
    out, _ = _empty_outputs(q, k, values)
    prefix = _initial(q, values, state)
    for piece in pieces.slices:
        phi_q, phi_k, v = pieces(piece)
        kernel_matrix = einsum(phi_q, phi_k, "b n h p, b m h p -> b h n m").tril()
        inside = einsum(kernel_matrix, v, "b h n m, b m h v -> b n h v")
        out[:, piece] = inside + einsum(phi_q, prefix, "b n h p, b h p v -> b n h v")
        prefix += einsum(phi_k, v, "b n h p, b n h v -> b h p v")
    return out, prefix


def _empty_outputs(q: Tensor, k: Tensor, values: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    B, N, H, P = q.shape
    V = values.shape[-1]
    dtype = accumulation_dtype(q.dtype)
    return q.new_empty((B, N, H, V), dtype=dtype), q.new_empty((B, H, P, V), dtype=dtype)


@torch.library.custom_op("primal_attention::scan_backward", mutates_args=())
@exact
def _backward(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    state: Tensor | None,
    token_mask: Tensor | None,
    map_q: str,
    map_k: str,
    d_out: Tensor,
    d_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    pieces = _Pieces(q, k, values, token_mask, (map_q, map_k))
    dq, dk, d_values, _ = _empty_gradients(q, k, values)
    prefix = _initial(q, values, state)
    for piece in pieces.slices:
        phi_q, phi_k, v = pieces(piece)
        dy = accumulate(d_out[:, piece])
        d_kernel = einsum(dy, v, "b n h v, b m h v -> b h n m").tril()
        d_phi = einsum(d_kernel, phi_k, "b h n m, b m h p -> b n h p")
        d_phi += einsum(dy, prefix, "b n h v, b h p v -> b n h p")
        d_phi = masked(d_phi, pieces.mask(piece))
        dq[:, piece] = pieces.map_q.vjp(accumulate(q[:, piece]), d_phi)
        prefix += einsum(phi_k, v, "b n h p, b n h v -> b h p v")
    suffix = d_state.clone()
    for piece in reversed(pieces.slices):
        phi_q, phi_k, v = pieces(piece)
        dy = accumulate(d_out[:, piece])
        d_kernel = einsum(dy, v, "b n h v, b m h v -> b h n m").tril()
        d_phi = einsum(d_kernel, phi_q, "b h n m, b n h p -> b m h p")
        d_phi += einsum(v, suffix, "b m h v, b h p v -> b m h p")
        d_phi = masked(d_phi, pieces.mask(piece))
        dk[:, piece] = pieces.map_k.vjp(accumulate(k[:, piece]), d_phi)
        kernel_matrix = einsum(phi_q, phi_k, "b n h p, b m h p -> b h n m").tril()
        dv = einsum(kernel_matrix, dy, "b h n m, b n h v -> b m h v")
        d_values[:, piece] = dv + einsum(phi_k, suffix, "b m h p, b h p v -> b m h v")
        suffix += einsum(phi_q, dy, "b n h p, b n h v -> b h p v")
    return dq, dk, d_values, suffix


def _empty_gradients(
    q: Tensor, k: Tensor, values: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, state = _empty_outputs(q, k, values)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(values), state


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.map_q, ctx.map_k = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, d_out: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, token_mask = ctx.saved_tensors
    grads: list[Tensor | None]
    if torch.is_grad_enabled():
        maps = {"token_mask": token_mask, "map_q": ctx.map_q, "map_k": ctx.map_k}
        grads = differentiable_gradients(
            lambda *x: reference.scan(*x, **maps), tensors, [d_out, d_state]
        )
    else:
        computed = _backward(*tensors, token_mask, ctx.map_q, ctx.map_k, d_out, d_state)
        grads = [None if x is None else d for x, d in zip(tensors, computed, strict=True)]
    return (*grads, None, None, None)


torch.library.register_fake("primal_attention::scan_forward", _empty_outputs)
torch.library.register_fake("primal_attention::scan_backward", _empty_gradients)
torch.library.register_autograd("primal_attention::scan_forward", _gradients, setup_context=_save)
