r"""Causal sums in plain PyTorch: running means, and the scan.

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

from primal_attention.ops.op import fused
from primal_attention.ops.primal.eager import (
    Maps,
    features,
    gram,
    grown,
    rows_of,
    tokens_first,
    zeroed,
)
from primal_attention.ops.walk import Tensors, walk
from primal_attention.precision import accumulate, without_autocast

BLOCK = 64  # tokens


class Scanned(NamedTuple):
    """Outputs of all tokens and the sums after the last one, in the accumulation dtype."""

    out: Tensor  # [..., N, V]
    state: Tensor  # [..., P, V]


class ScanInputs(NamedTuple):
    """All that a scan is made of."""

    q: Tensor  # [B, N, H, C]: whose features read
    k: Tensor  # [B, N, H, C]: whose features store
    values: Tensor  # [B, N, H, V]
    state: Tensor | None  # [B, H, P, V]: the sum over earlier tokens
    token_mask: Tensor | None  # [B, N], True = real token
    map_q: str
    map_k: str


class MeanInputs(NamedTuple):
    """All that running means are made of."""

    z: Tensor  # [B, N, H, C]
    before: Tensor | None  # [B, H, C]: the sum over earlier tokens
    counts: Tensor  # [B, N]: real tokens up to each
    token_mask: Tensor | None  # [B, N]


def scan(
    near: Tensor,  # [..., N, C]: whose features read
    far: Tensor,  # [..., N, C]: whose features store
    values: Tensor,  # [..., N, V]
    maps: tuple[Maps, Maps],  # of near and of far
    mask: Tensor | None,  # [B, N, 1]
    state: Tensor | None = None,  # [..., P, V]: the sum over earlier tokens
) -> Scanned:
    """Each token reads the sum over those up to it; padded ones read zero and store nothing."""
    if near.ndim == 4:
        before = None if state is None else state.transpose(0, 1)
        q, k, v = map(tokens_first, (near, far, values))
        found = fused("scan", ScanInputs(q, k, v, before, rows_of(mask), maps[0][0], maps[1][0]))
        if found is not None:
            return Scanned(found[0].permute(2, 0, 1, 3), found[1].transpose(0, 1))
    (out,), (after,) = walk(partial(_scan, maps), (state,), (near, far, values, mask))
    return Scanned(out, after)


def scan_eager(given: ScanInputs) -> tuple[Tensor, Tensor]:
    """The scan with tokens before heads, in plain PyTorch."""
    mask = None if given.token_mask is None else given.token_mask[:, :, None]
    rows = [each.permute(2, 0, 1, 3) for each in given[:3]]
    before = None if given.state is None else given.state.transpose(0, 1)
    maps = (given.map_q,), (given.map_k,)
    (out,), (after,) = walk(partial(_scan, maps), (before,), (*rows, mask))
    assert after is not None
    return tokens_first(out), after.transpose(0, 1)


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
    state: Tensor | None,  # [2, H, B, P, S]: the sums phi_q h_e^T, phi_k h_r^T of earlier tokens
    *,
    grams: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Sums $e_t = \sum_{\tau \le t} \kappa(x_t, x_\tau) h_{r,\tau}$, and r with exchanged sides.

    The state after the last token and, where wanted, the Gram matrices of these tokens follow.
    """
    found = _fused_dual_scores(z, h, maps, mask, state)
    if found is not None:
        return *found, gram(z, maps, mask) if grams else None
    (scores,), (after, *rest) = walk(
        partial(_dual_scores, maps, grams), (state, None)[: 1 + grams], (z, h, mask)
    )
    return scores, after, rest[0] if grams else None


def _fused_dual_scores(
    z: Tensor, h: Tensor, maps: Maps, mask: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """The scores and the state after the last token by a fused scan for each side."""
    read, stored = [], []
    for near, far in ((0, 1), (1, 0)):
        before = None if state is None else state[far].transpose(0, 1)
        q, k, values = map(tokens_first, (z[near], z[far], h[far]))
        given = ScanInputs(q, k, values, before, rows_of(mask), maps[near], maps[far])
        found = fused("scan", given)
        if found is None:
            return None
        read.append(found[0].permute(2, 0, 1, 3))
        stored.append(found[1].transpose(0, 1))
    return torch.stack(read), torch.stack(stored[::-1])


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
    if torch.compiler.is_exporting() or N <= BLOCK:  # one block; a graph is for any length
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
    *lead, N, C = z.shape
    if z.ndim > 3 and z.numel():
        B = lead[-1]
        before = None if total is None else total.reshape(-1, B, C).transpose(0, 1)
        given = MeanInputs(
            tokens_first(z.reshape(-1, B, N, C)), before, counts[:, :, 0], rows_of(mask)
        )
        found = fused("running_mean", given)
        if found is not None:
            mean, after = found
            return mean.permute(2, 0, 1, 3).view(z.shape), after.transpose(0, 1).reshape(
                *lead, 1, C
            )
    with without_autocast(z.device):
        sums = zeroed(accumulate(z), mask).cumsum(-2)
        sums = sums if total is None else sums + total
        return (sums / counts.clamp(min=1)).to(z.dtype), sums[..., -1:, :]


def mean_eager(given: MeanInputs) -> tuple[Tensor, Tensor]:
    """Running means with tokens before heads and the sum after the last, in plain PyTorch."""
    sums = accumulate(given.z)
    if given.token_mask is not None:
        sums = torch.where(given.token_mask[:, :, None, None], sums, 0.0)
    sums = sums.cumsum(1)
    sums = sums if given.before is None else sums + given.before[:, None]
    mean = sums / given.counts.clamp(min=1)[:, :, None, None]
    return mean.to(given.z.dtype), sums[:, -1]
