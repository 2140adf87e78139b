r"""Causal sums in plain PyTorch: running means and scans.

    y_t = \phi(a_t)^T S_t        S_t = \lambda_t S_{t-1} + \phi(b_t) v_t^T

Blocks of tokens are worked on side by side: inside a block the kernel matrix is dense, and what
comes from earlier blocks is one sum for each block. The causal form of the dual weights is two such
scans, stacked: queries read what keys have stored, and keys what queries have.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, V values, n tokens and
G number of the blocks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.primal.eager import Maps, features, grown, zeroed
from primal_attention.ops.walk import Tensors, walk
from primal_attention.precision import accumulate, without_autocast

BLOCK = 64  # tokens


class Scanned(NamedTuple):
    """Outputs of all tokens and the sums after the last one, in the accumulation dtype."""

    out: Tensor  # [..., N, V]
    state: Tensor  # [..., P, V]


def scan(
    near: Tensor,  # [..., N, C]: whose features read
    far: Tensor,  # [..., N, C]: whose features store
    values: Tensor,  # [..., N, V]
    maps: tuple[Maps, Maps],  # of near and of far
    mask: Tensor | None,  # [B, N, 1]
    state: Tensor | None = None,  # [..., P, V]: the sum over earlier tokens
) -> Scanned:
    """Each token reads the sum up to itself; padded ones read zero and store nothing."""
    (out,), (after,) = walk(partial(_scan, maps), (state,), (near, far, values, mask))
    return Scanned(out, after)


def _scan(
    maps: tuple[Maps, Maps], state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    near, far, values, mask = rows
    phi_near, phi_far = features(near, maps[0], mask), features(far, maps[1], mask)
    out, after = read_and_store(phi_near, phi_far, zeroed(accumulate(values), mask), state[0])
    return [out], [after]


def dual_scores(
    z: Tensor,  # [2, H, B, N, C]
    h: Tensor,  # [2, H, B, N, S]: h_e and h_r
    maps: Maps,
    mask: Tensor | None,  # [B, N, 1]
    state: Tensor
    | None,  # [2, H, B, P, S]: sums of phi_q h_e^T and phi_k h_r^T over earlier tokens
    *,
    grams: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Sums $e_t = \sum_{\tau \le t} \kappa(x_t, x_\tau) h_{r,\tau}$, and r with sides exchanged.

    The state after the last token and, where wanted, the Gram matrices of these tokens follow.
    """
    (scores,), (after, *rest) = walk(
        partial(_dual_scores, maps, grams), (state, None)[: 1 + grams], (z, h, mask)
    )
    return scores, after, rest[0] if grams else None


def _dual_scores(
    maps: Maps, grams: bool, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    z, h, mask = rows
    phi, h = features(z, maps, mask), zeroed(accumulate(h), mask)
    before = None if state[0] is None else state[0].flip(0)
    scores, after = read_and_store(phi, phi.flip(0), h.flip(0), before)
    rest = [grown(state[1], phi.mT @ phi)] if grams else []
    return [scores], [after.flip(0), *rest]


def read_and_store(
    near: Tensor, far: Tensor, values: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scan of features near, far [..., N, P] and values [..., N, V]."""
    N = near.shape[-2]
    if N <= BLOCK and not torch.compiler.is_exporting():  # one block; a graph has any length
        out = (near @ far.mT).tril() @ values
        after = far.mT @ values
        if before is None:
            return out, after
        return out + near @ before, after + before
    near, far, values = (_in_blocks(each) for each in (near, far, values))  # [..., G, n, .]
    sums = far.mT @ values  # [..., G, P, V]
    first = torch.zeros_like(sums[..., :1, :, :]) if before is None else before.unsqueeze(-3)
    up_to = torch.cat((first, sums), -3).cumsum(-3)  # before each block, and after the last
    out = (near @ far.mT).tril() @ values + near @ up_to[..., :-1, :, :]
    return out.flatten(-3, -2)[..., :N, :], up_to[..., -1, :, :]


def _in_blocks(rows: Tensor) -> Tensor:
    """The rows [..., N, C] as blocks [..., G, n, C], the last one filled up with zeros."""
    rows = F.pad(rows, (0, 0, 0, -rows.shape[-2] % BLOCK))
    return torch.unflatten(rows, -2, (-1, BLOCK))


def token_counts(z: Tensor, token_mask: Tensor | None, before: Tensor | None) -> Tensor:
    """How many real tokens of z [B, N, ...] each position has seen, itself included, [B, N]."""
    if token_mask is None:
        counts = torch.arange(1, z.shape[1] + 1, device=z.device).expand(z.shape[:2])
    else:
        counts = token_mask.cumsum(1)
    return counts if before is None else counts + before[:, None]


def running_mean(
    z: Tensor,  # [..., B, N, C]
    mask: Tensor | None,  # [B, N, 1]
    counts: Tensor,  # [B, N, 1]: real tokens up to each
    total: Tensor | None = None,  # [..., B, 1, C]: the sum over earlier tokens
) -> tuple[Tensor, Tensor]:
    r"""$\bar z_t = \frac1t \sum_{\tau \le t} z_\tau$ and the sum after the last token.

    It keeps nothing of the sequence for the backward pass.
    """
    with without_autocast(z.device):
        sums = zeroed(accumulate(z), mask).cumsum(-2)
        sums = sums if total is None else sums + total
        return (sums / counts.clamp(min=1)).to(z.dtype), sums[..., -1:, :]
