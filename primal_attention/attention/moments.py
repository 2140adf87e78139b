r"""Attention whose weights are products of features, in linear time.

$y_i = \frac{\sum_j \phi_q(i)^\top \phi_k(j)\, v_j}{\sum_j \phi_q(i)^\top \phi_k(j)}
     = \frac{\phi_q(i)^\top S}{\phi_q(i)^\top z}$ with the moments $S = \sum_j \phi_k(j) v_j^\top$
and $z = \sum_j \phi_k(j)$. Both come from one pass: the values get a channel that is 1.

Letters: B batch, N tokens, T source tokens, H heads, P feature dim, C head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

from primal_attention.ops.moment import moment
from primal_attention.ops.scan import scan
from primal_attention.precision import accumulate, exact


class Moments(NamedTuple):
    """S and z over the tokens so far, in at least float32."""

    kv: Tensor  # [B, H, P, C]
    k_sum: Tensor  # [B, H, P]


def empty_moments(k: Tensor, batch_size: int, num_heads: int, shape: tuple[int, int]) -> Moments:
    """The moments of no token, for a shape (P, C), with the device of k and its dtype widened."""
    kv = accumulate(k.new_zeros(batch_size, num_heads, *shape))
    return Moments(kv, kv[..., 0])


@exact
def attend_moments(
    phi_q: Tensor,  # [B, N, H, P], positive
    phi_k: Tensor,  # [B, T, H, P], positive
    v: Tensor,  # [B, T, H, C]
    source_mask: Tensor | None,  # [B, T], True = real token
    *,
    least: float,
) -> Tensor:
    """Outputs [B, N, H, C] over all real source tokens; the normaliser is at least ``least``."""
    total = moment(phi_k, _with_ones(v), token_mask=source_mask, feature_map="identity")
    read = einsum(phi_q, total, "b n h p, b h p c -> b n h c")
    return _normalised(read, least).to(v.dtype)


@exact
def scan_moments(
    phi_q: Tensor,  # [B, N, H, P], positive
    phi_k: Tensor,  # [B, N, H, P], positive
    v: Tensor,  # [B, N, H, C]
    before: Moments | None,
    mask: Tensor | None,  # [B, N], True = real token
    *,
    least: float,
) -> tuple[Tensor, Moments]:
    """Outputs [B, N, H, C] over the tokens up to each, and the moments after the last."""
    state = None if before is None else torch.cat([before.kv, before.k_sum[..., None]], dim=-1)
    read, state = scan(
        phi_q,
        phi_k,
        _with_ones(v),
        state=state,
        token_mask=mask,
        map_q="identity",
        map_k="identity",
    )
    return _normalised(read, least).to(v.dtype), Moments(state[..., :-1], state[..., -1])


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def _normalised(read: Tensor, least: float) -> Tensor:
    return read[..., :-1] / read[..., -1:].clamp(min=least)
