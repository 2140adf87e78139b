r"""Causal sums in plain PyTorch: running means, and scans with or without a learned time.

    e_i = \sum_j \kappa(x_i, x_j) v_j        \kappa(x_i, x_j) = d_{ij} \phi_q(x_i)^\top \phi_k(x_j)

    r_i = \sum_j \kappa(x_j, x_i) u_j        d_{ij} = e^{-|a_i - a_j|}

    a_i = \sum_{t \le i} \delta_t

The sums are over the tokens up to i, or over all of them. Without steps $\delta_t$ of time d is 1.
Of two sides, both read the same matrix of kernel values; one side is linear attention's scan.

Blocks of tokens are worked on side by side: inside a block the kernel matrix is dense, and what
comes from other blocks is one sum for each block. Every exponential is of a number that is not
positive, a time between two tokens, blocks or chunks.

Letters: B batch, N tokens, H heads, C head dim, P feature dim, S directions, V values, n tokens and
G number of the blocks.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from primal_attention.ops.op import chunk_size, fused, is_exporting, may_run_fused
from primal_attention.ops.primal.eager import Maps, features, rows_of, zeroed
from primal_attention.ops.walk import Tensors, walk
from primal_attention.precision import accumulate, without_autocast

BLOCK = 64  # tokens


class ScanInputs(NamedTuple):
    """All that a scan is made of; ``future`` says that later tokens are read too."""

    z: Tensor  # [2, B, N, H, C]: queries and keys
    values: Tensor  # [B, N, sides, H, V]: u and v, or v alone
    state: Tensor | None  # [B, H, sides, P, V]: the sums over earlier tokens
    steps: Tensor | None  # [B, N, H]: delta, not negative
    token_mask: Tensor | None  # [B, N], True = real token
    map_q: str
    map_k: str
    future: bool


def scan(
    z: Tensor,  # [2, H, B, N, C]: queries and keys
    values: Tensor,  # [2, H, B, N, V]: u and v; or [1, H, B, N, V]: v, for e alone
    maps: Maps,
    mask: Tensor | None,  # [B, N, 1]
    state: Tensor | None = None,  # [sides, H, B, P, V]: sums over earlier tokens
    *,
    steps: Tensor | None = None,  # [H, B, N]: delta, not negative; zero at padded tokens
    future: bool = False,  # whether later tokens are read too, which needs steps
) -> tuple[Tensor, Tensor]:
    """Read at each token the sums up to it; return the reads and the sums after the last token.

    Both are in the accumulation dtype: [sides, H, B, N, V], and [sides, H, B, P, V], of two sides
    phi_q u^T and phi_k v^T. Padded tokens read zero and store nothing; no time passes there.
    """
    if future and steps is None:
        raise ValueError("future=True needs steps of time: give steps, zeros where none passes")
    if may_run_fused("scan", z):
        given = ScanInputs(
            z.permute(0, 2, 3, 1, 4),
            values.permute(2, 3, 0, 1, 4),
            None if state is None else state.permute(2, 1, 0, 3, 4),
            None if steps is None else steps.permute(1, 2, 0),
            rows_of(mask),
            maps[0],
            maps[1],
            future,
        )
        found = fused("scan", given)
        if found is not None:
            out, after = found
            return out.permute(3, 2, 0, 1, 4), after.permute(2, 1, 0, 3, 4)
    return _scan_eager(maps, future, (z, values, mask, steps), state)


def scan_eager(given: ScanInputs) -> tuple[Tensor, Tensor]:
    """Scan with tokens before heads in plain PyTorch: [B, N, H, sides, V], [B, H, sides, P, V]."""
    z, values, state, steps, mask, *maps, future = given
    rows = (
        z.permute(0, 3, 1, 2, 4),
        values.permute(2, 3, 0, 1, 4),
        None if mask is None else mask[:, :, None],
        None if steps is None else steps.permute(2, 0, 1),
    )
    state = None if state is None else state.permute(2, 1, 0, 3, 4)
    out, after = _scan_eager(tuple(maps), future, rows, state)
    return out.permute(2, 3, 1, 0, 4), after.permute(2, 1, 0, 3, 4)


def _scan_eager(
    maps: Maps, future: bool, given: Tensors, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan z, values, mask and steps with heads before tokens."""
    z, values, mask, steps = given
    rows = (z, values, mask, None if steps is None else steps.unsqueeze(-1))
    (out,), (after,) = walk(partial(_scan, maps, future), (state,), rows)
    if future and chunk_size(z) < z.shape[-2]:
        (later,), _ = walk(partial(_scan_later, maps), (None,), rows, reverse=True)
        out = out + later
    return out, after


def _scan(
    maps: Maps, future: bool, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    z, values, mask, steps = rows
    phi, values = features(z, maps, mask), zeroed(accumulate(values), mask)
    steps = None if steps is None else zeroed(accumulate(steps), mask).squeeze(-1)
    out, after = read_and_store(phi, values, state[0], steps, future=future)
    return [out], [after]


def _scan_later(
    maps: Maps, state: Tensors, rows: Tensors, shared: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    """Read the sums of later chunks, which are decayed to the last token of this one."""
    z, values, mask, steps = rows
    phi, values = features(z, maps, mask), zeroed(accumulate(values), mask)
    times = zeroed(accumulate(steps), mask).cumsum(-2)  # since the last chunk
    last = times[..., -1:, :]
    reads, stores = _readers(phi, values), _stores(phi, values)
    sums = (stores * (-times).exp()).mT @ values
    if state[0] is None:
        return [torch.zeros_like(values)], [sums]
    out = (reads * (times - last).exp()) @ _of_readers(state[0])
    return [out], [sums + state[0] * (-last).exp()]


def read_and_store(
    phi: Tensor,  # [2, ..., N, P]
    values: Tensor,  # [sides, ..., N, V]
    before: Tensor | None,  # [sides, ..., P, V]
    steps: Tensor | None = None,  # [..., N]
    *,
    future: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scan features; return the reads and the sums after the last token."""
    N = phi.shape[-2]
    if not is_exporting() and N == 1 and not future:  # the token after a state
        after = _stores(phi, values).mT @ values
        if before is not None:
            after = after + (before if steps is None else before * (-steps).exp()[..., None])
        return _readers(phi, values) @ _of_readers(after), after
    if is_exporting() or N <= BLOCK:  # one block; a graph is for any length
        times = None if steps is None else steps.cumsum(-1)
        out = _read_inside(phi, values, times, future)
        if times is None:
            after = _stores(phi, values).mT @ values
            if before is None:
                return out, after
            return out + _readers(phi, values) @ _of_readers(before), after + before
        last = times[..., -1:]
        after = (_stores(phi, values) * (times - last).exp()[..., None]).mT @ values
        if before is None:
            return out, after
        reads = _readers(phi, values) * (-times).exp()[..., None]
        return out + reads @ _of_readers(before), after + before * (-last).exp()[..., None]
    phi, values = _in_blocks(phi), _in_blocks(values)  # [., ..., G, n, .]
    if steps is None:
        up_to = _with_first(_stores(phi, values).mT @ values, before).cumsum(-3)
        out = _read_inside(phi, values, None, future)
        out = out + _readers(phi, values) @ _of_readers(up_to[..., :-1, :, :])
        return out.flatten(-3, -2)[..., :N, :], up_to[..., -1, :, :]
    times = _in_blocks(steps[..., None]).squeeze(-1).cumsum(-1)  # [..., G, n]: since the last block
    out, after = _read_blocks(phi, values, before, times, future)
    return out.flatten(-3, -2)[..., :N, :], after


def _read_blocks(
    phi: Tensor, values: Tensor, before: Tensor | None, times: Tensor, future: bool
) -> tuple[Tensor, Tensor]:
    """Read inside each block, of those before it and, where wanted, of those behind it."""
    lasts = times[..., -1:]
    since, until = (-times).exp()[..., None], (times - lasts).exp()[..., None]
    reads, stores = _readers(phi, values), _stores(phi, values)
    ends = F.pad(lasts.squeeze(-1).cumsum(-1), (1, 0))  # [..., G + 1]: where blocks begin and end
    lags = (ends[..., None, :] - ends[..., :, None]).tril()
    decay = lags.exp().tril()  # from the end of one block to that of another
    sums = _with_first((stores * until).mT @ values, before)
    up_to = _over_blocks(decay, sums)
    out = _read_inside(phi, values, times, future)
    out = out + (reads * since) @ _of_readers(up_to[..., :-1, :, :])
    if future:
        sums = (stores * since).mT @ values
        sums = torch.cat((sums, torch.zeros_like(sums[..., :1, :, :])), -3)
        behind = _over_blocks(decay.mT, sums)
        out = out + (reads * until) @ _of_readers(behind[..., 1:, :, :])
    return out, up_to[..., -1, :, :]


def _over_blocks(decay: Tensor, sums: Tensor) -> Tensor:
    """The sums [sides, ..., G, P, V] of the blocks that a matrix [..., G, G] adds up."""
    return torch.unflatten(decay @ sums.flatten(-2), -1, tuple(sums.shape[-2:]))


def _read_inside(phi: Tensor, values: Tensor, times: Tensor | None, future: bool) -> Tensor:
    """Let the tokens of a block read each other by its dense kernel matrix [..., n, n]."""
    kernel = phi[0] @ phi[1].mT
    if times is not None:
        lag = times[..., None, :] - times[..., :, None]
        n = lag.shape[-1]
        earlier = torch.ones(n, n, dtype=torch.bool, device=lag.device).tril()
        kernel = kernel * torch.where(earlier, lag, -lag).exp()
    reads = (kernel, kernel.mT) if len(values) == 2 else (kernel,)
    read = [
        (each if future else each.tril()) @ stored
        for each, stored in zip(reads, reversed(values.unbind()), strict=True)
    ]
    return torch.stack(read)


def _readers(phi: Tensor, values: Tensor) -> Tensor:
    """The features that read: those of the queries, and of two sides those of the keys."""
    return phi[: len(values)]


def _stores(phi: Tensor, values: Tensor) -> Tensor:
    """The features with which values are stored: of one side those of the keys."""
    return phi[-len(values) :]


def _of_readers(sums: Tensor) -> Tensor:
    """Sums by the side that reads them: queries read what keys have stored."""
    return sums.flip(0) if len(sums) == 2 else sums


def _with_first(sums: Tensor, before: Tensor | None) -> Tensor:
    """The sums [..., G, P, V] of the blocks behind the sum before the first of them."""
    first = torch.zeros_like(sums[..., :1, :, :]) if before is None else before.unsqueeze(-3)
    return torch.cat((first, sums), -3)


def _in_blocks(rows: Tensor) -> Tensor:
    """The rows [..., N, C] as blocks [..., G, n, C], the last one filled up with zeros."""
    rows = F.pad(rows, (0, 0, 0, -rows.shape[-2] % BLOCK))
    return torch.unflatten(rows, -2, (-1, BLOCK))


def token_counts(z: Tensor, token_mask: Tensor | None, before: Tensor | None) -> Tensor:
    """Count the real tokens of z [B, N, ...] up to each position, itself included, [B, N]."""
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
