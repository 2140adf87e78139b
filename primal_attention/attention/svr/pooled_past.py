r"""Causal attention to a past that is pooled: the causal form of Attention-SH (ours).

The tokens are cut into blocks of r. Query i sees one pooled key for each block that is complete by
then, $(b + 1)\, r - 1 \le i$, and the tokens after the last complete block one by one, up to
itself: every token up to i counts once. The cost is N (N / r + r).

Letters: B batch, N queries, T tokens, H heads, C head dim, n blocks, r tokens of a block,
M pooled tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import einsum
from torch import Tensor

from primal_attention.attention.base.compaction import take
from primal_attention.attention.baselines.blocks import into_blocks
from primal_attention.attention.svr.batch_norm import (
    KeyMoments,
    merge,
    no_moments,
    running_key_moments,
)
from primal_attention.attention.svr.pooling import POOLS
from primal_attention.precision import accumulate, exact


class _Frame(NamedTuple):
    """Whole blocks around the queries; places without a query hold some other one."""

    token: Tensor  # [B, n, r], which token of the sequence stands there; [1, n, r] if all agree
    q: Tensor  # [B, n, r, H, C]
    k: Tensor  # [B, n, r, H, C]
    v: Tensor  # [B, n, r, H, C]


@exact
def attend_past(
    q: Tensor,  # [B, N, H, C]
    k: Tensor,  # [B, T, H, C], no padding before a real token
    v: Tensor,  # [B, T, H, C]
    *,
    num_before: Tensor | None,  # [B], how many tokens precede the first query; None for 0
    scale: int,
    pool: str,
    fold: Callable[[Tensor, KeyMoments], Tensor] | None = None,
) -> Tensor:
    """Outputs [B, N, H, C]; ``fold`` makes Attention-BN of it, with the moments of what is seen."""
    frame = _frame(accumulate(q), accumulate(k), accumulate(v), num_before, scale)
    k_pooled, v_pooled = (POOLS[pool](into_blocks(accumulate(z), scale), None) for z in (k, v))
    num_complete = (frame.token + 1) // scale
    queries = frame.q
    if fold is not None:
        folded = fold(queries.flatten(1, 2), _moments_seen(frame.k, k_pooled, num_complete))
        queries = folded.view_as(queries)
    queries = queries * q.shape[-1] ** -0.5
    past = torch.arange(k_pooled.shape[1], device=q.device) < num_complete[..., None]
    of_past = einsum(queries, k_pooled, "b n r h c, b m h c -> b h n r m")
    of_block = einsum(queries, frame.k, "b n r h c, b n m h c -> b h n r m")
    scores = [_hide(of_past, past[:, None]), _hide(of_block, _seen_in_block(scale, q.device))]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = einsum(weights[..., :-scale], v_pooled, "b h n r m, b m h c -> b n r h c")
    out = out + einsum(weights[..., -scale:], frame.v, "b h n r m, b n m h c -> b n r h c")
    return _out_of_frame(out.flatten(1, 2), num_before, scale, q.shape[1]).to(q.dtype)


def _frame(q: Tensor, k: Tensor, v: Tensor, num_before: Tensor | None, scale: int) -> _Frame:
    N, T = q.shape[1], k.shape[1]
    if num_before is None:
        token = torch.arange(N, device=q.device)[None]
        k, v = k[:, :N], v[:, :N]
    else:
        start = num_before - num_before % scale
        token = start[:, None] + torch.arange(N + scale - 1, device=q.device)
        q = take(q, (token - num_before[:, None]).clamp(min=0, max=N - 1))
        k, v = (take(z, token.clamp(max=T - 1)) for z in (k, v))
    token, q, k, v = (into_blocks(z, scale) for z in (token, q, k, v))
    return _Frame(token, q, k, v)


def _out_of_frame(out: Tensor, num_before: Tensor | None, scale: int, num_queries: int) -> Tensor:
    if num_before is None:
        return out[:, :num_queries]
    first = num_before % scale
    return take(out, first[:, None] + torch.arange(num_queries, device=out.device))


def _hide(scores: Tensor, seen: Tensor) -> Tensor:
    """The least score, not -inf, where nothing is seen: the frame has places without a query."""
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)


def _seen_in_block(scale: int, device: torch.device) -> Tensor:
    """Which tokens of its block a query sees one by one, [r, r]: none once it is complete."""
    place = torch.arange(scale, device=device)
    return (place <= place[:, None]) & (place[:, None] < scale - 1)


def _moments_seen(k_blocks: Tensor, k_pooled: Tensor, num_complete: Tensor) -> KeyMoments:
    """Moments of the keys each place sees, [B, n r, H, C]: pooled ones and those of its block."""
    B, n, r = k_blocks.shape[:3]
    index = num_complete.clamp(max=k_pooled.shape[1]).flatten(1).expand(B, -1)
    pairs = zip(no_moments(k_pooled), running_key_moments(k_pooled, None), strict=True)
    pooled = KeyMoments(*(take(torch.cat(pair, dim=1), index) for pair in pairs))
    single = running_key_moments(k_blocks.flatten(0, 1), None)
    open_block = torch.arange(1, r + 1, device=k_blocks.device)[:, None, None] < r
    num_keys, mean, scatter = (
        moment.reshape(B, n * r, *moment.shape[2:])
        for moment in (single.num_keys * open_block, single.mean, single.scatter * open_block)
    )
    return merge(pooled, KeyMoments(num_keys, mean, scatter))
