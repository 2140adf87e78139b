"""The landmarks X' of f(X): M tokens taken evenly from the real tokens of each sequence.

All of it is tensor arithmetic on the input's device, without a look at the values from the host.

Letters: B batch, N tokens, D model dim, M landmarks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def landmarks(
    x: Tensor,  # [B, N, D]
    num_landmarks: int,
    *,
    token_mask: Tensor | None = None,  # [B, N], True = real token; holes are allowed
    dropout: float = 0.0,
    jitter: float = 0.0,
) -> Tensor:
    """X' [B, M, D]; zero for a sequence without a real token.

    Landmark i of M stands at real token i (n-1) // max(M-1, 1) of n, in integer arithmetic: the
    first and the last are always in, and tokens repeat where n < M. ``jitter`` moves each one by a
    whole number of tokens, uniformly within so many landmark spacings; ``dropout`` zeroes whole
    landmarks and scales the rest up. Both are drawn for each sequence and landmark.
    """
    num_tokens = _num_tokens(x, token_mask)  # [B]
    order = landmark_order(num_tokens, num_landmarks)  # [B, M]
    if jitter > 0:
        order = _jittered(order, num_tokens, jitter)
    index = _token_of(order, token_mask)
    x_sampled = x.gather(1, index[:, :, None].expand(-1, -1, x.shape[-1]))
    if token_mask is not None:
        x_sampled = torch.where((num_tokens > 0)[:, None, None], x_sampled, 0.0)
    if dropout > 0:
        kept = torch.rand(index.shape, device=x.device) >= dropout
        x_sampled = x_sampled * (kept / (1.0 - dropout)).to(x.dtype)[:, :, None]
    return x_sampled


def _num_tokens(x: Tensor, token_mask: Tensor | None) -> Tensor:
    if token_mask is None:
        return torch.full((x.shape[0],), x.shape[1], device=x.device)
    return token_mask.sum(1)


def landmark_order(num_tokens: Tensor, num_landmarks: int) -> Tensor:
    """Which of the n real tokens each landmark is, counted from 0, [B, M]."""
    i = torch.arange(num_landmarks, device=num_tokens.device)
    last = (num_tokens - 1).clamp(min=0)
    return i * last[:, None] // max(num_landmarks - 1, 1)


def _jittered(order: Tensor, num_tokens: Tensor, jitter: float) -> Tensor:
    last = (num_tokens - 1).clamp(min=0)[:, None]
    spacing = last / max(order.shape[1] - 1, 1)
    offset = (2.0 * torch.rand(order.shape, device=order.device) - 1.0) * jitter * spacing
    return (order + offset.round().long()).clamp(min=0).minimum(last)


def _token_of(order: Tensor, token_mask: Tensor | None) -> Tensor:
    """Position in the sequence of each real token, counted among the real ones."""
    if token_mask is None:
        return order
    seen = token_mask.cumsum(1)  # [B, N], non-decreasing
    return torch.searchsorted(seen, order + 1).clamp(max=token_mask.shape[1] - 1)
