"""From the mask a host passes to the padding it stands for.

A host has one mask for all its layers: additive or boolean, of shape [batch, 1, queries, keys]. A
mechanism knows padding and causality. What is neither is refused, never dropped.

Letters: B batch, H heads, N queries, T keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_HIDDEN = -1e4  # an additive mask hides with this much or more


def token_mask_of(mask: Any, *, num_queries: int, num_before: int, causal: bool) -> Tensor | None:
    """The real ones [B, N] of the new tokens, from the mask of a self-attention.

    Args:
        mask: None, padding [B, T], or a mask [B, H or 1, N, T], boolean (True is seen) or additive.
        num_queries: How many new tokens there are, N.
        num_before: How many tokens came before them: T is at least N plus these.
        causal: Whether the layer is causal, and so must be the mask.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(mask).__name__}, of which a patched layer cannot read the "
            "padding; use the attention implementation 'sdpa' or 'eager'"
        )
    num_keys = num_before + num_queries
    if mask.shape[-1] < num_keys:
        raise ValueError(
            f"attention_mask covers {mask.shape[-1]} tokens, but there are {num_keys}: a mask of "
            "a sliding window cannot be honoured"
        )
    if mask.ndim == 2:
        return mask[:, num_before:num_keys] > 0
    seen = seen_by(mask)
    real = seen[:, 0, -1, :num_keys]  # the last token sees every real one
    expected = real[:, None, None, :]
    if causal:
        expected = expected & _past(num_queries, num_before, mask.device)
    padded = ~real[:, None, num_before:, None]
    whole = seen[..., :num_keys]
    # Some hosts let a padded query see everything, to spare its softmax the division by zero.
    fits = (whole == expected) | (padded & whole.all(-1, keepdim=True))
    _require(fits.all() & ~seen[..., num_keys:].any(), causal=causal)
    return real[:, num_before:]


def context_mask_of(mask: Tensor | None) -> Tensor | None:
    """The real tokens [B, T] of a context, from a mask [B, H or 1, N, T]."""
    if mask is None:
        return None
    seen = seen_by(mask)
    real = seen[:, 0, -1]
    _require((seen == real[:, None, None, :]).all(), causal=False)
    return real


def seen_by(mask: Tensor) -> Tensor:
    """Which keys each query sees, bool, from a boolean or additive mask."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    _check(
        (seen | (mask <= _HIDDEN)).all(),
        "the mask adds numbers to the scores (a position bias?), which a mechanism without a "
        "matrix of scores cannot honour",
    )
    return seen


def _past(num_queries: int, num_before: int, device: torch.device) -> Tensor:
    ones = torch.ones(num_queries, num_before + num_queries, dtype=torch.bool, device=device)
    return ones.tril(num_before)


def _require(fits: Tensor, *, causal: bool) -> None:
    form = "padding under a causal mask" if causal else "padding"
    _check(
        fits,
        f"the mask is more than {form}, which is all that this layer can honour. Masks of sliding "
        "windows, of packed sequences or of blocks have no counterpart; a causal mask needs "
        "patch(..., causal=True), a full one causal=False",
    )


def _check(condition: Tensor, message: str) -> None:
    """Raise unless the condition holds; inside a compiled graph, when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
