"""From the mask a host passes to the padding it stands for.

A host has one mask for all its layers: additive or boolean, of shape [batch, 1, queries, keys]. A
mechanism knows padding and causality. What is neither is refused, never dropped.

Letters: B batch, H heads, N queries, T keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from primal_attention.attention.base.compaction import Compaction

_HIDDEN = -1e4  # an additive mask hides with this much or more


def token_mask_of(
    mask: Any, *, num_queries: int, num_before: int | Tensor = 0, causal: bool
) -> Tensor | None:
    """Return which new tokens are real, [B, N], from the mask of a self-attention.

    Args:
        mask: None, padding [B, T], or a mask [B, H or 1, N, T], boolean (True is seen) or additive.
        num_queries: Number of new tokens N.
        num_before: Number of tokens before them, a tensor in a cache of fixed size: T is at least
            N plus these.
        causal: The layer is causal, and so must be the mask.
    """
    if mask is None:
        return None
    if _has_two_dimensions(mask, num_before + num_queries):
        return _selected(mask, num_queries, num_before) > 0
    real, fits = _as_padding(seen_by(mask), num_queries, num_before, causal=causal)
    _require(fits, causal=causal)
    return real


def rows_of(mask: Any, *, num_tokens: int, causal: bool) -> tuple[Tensor | None, Compaction | None]:
    """Read the mask of tokens with none before them, whose rows may be packed with sequences.

    Returns which tokens are real, None where all are; or how each sequence gets a row of its own. A
    compiled graph does not look for packed sequences: their number depends on the data.
    """
    if mask is None or _has_two_dimensions(mask, num_tokens) or torch.compiler.is_compiling():
        return token_mask_of(mask, num_queries=num_tokens, causal=causal), None
    seen = seen_by(mask)
    real, fits = _as_padding(seen, num_tokens, 0, causal=causal)
    if bool(fits):
        return real, None
    real, starts, fits = _as_sequences(seen, num_tokens, causal=causal)
    _require(fits, causal=causal)
    return None, _in_rows(starts, real)


def _in_rows(starts: Tensor, real: Tensor) -> Compaction:
    """Give each sequence a row, by the first token of the sequence that each token belongs to."""
    along = (torch.arange(starts.shape[1], device=starts.device) - starts).flatten()
    flat = real.flatten()
    number = ((along == 0) & flat).cumsum(0) - 1
    shape = int(number[-1]) + 1, int(along[flat].max()) + 1
    back = torch.where(flat, number * shape[1] + along, -1)
    there = back.new_full((shape[0] * shape[1],), -1)
    there[back[flat]] = torch.arange(len(back), device=back.device)[flat]
    return Compaction(there, back, shape, tuple(real.shape), (there.view(shape) >= 0).sum(1))


def context_mask_of(mask: Tensor | None) -> Tensor | None:
    """Return which tokens of a context are real, [B, T], from a mask [B, H or 1, N, T]."""
    if mask is None:
        return None
    seen = seen_by(mask)
    real = seen[:, 0, -1]
    _require((seen == real[:, None, None, :]).all(), causal=False)
    return real


def seen_by(mask: Tensor) -> Tensor:
    """Return which keys each query sees, bool, from a boolean or additive mask."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    _check(
        (seen | (mask <= _HIDDEN)).all(),
        "the mask adds numbers to the scores (a position bias?), which a mechanism without a "
        "matrix of scores cannot honour",
    )
    return seen


def expanded(real: Tensor | None, tokens: Tensor) -> Tensor | None:
    """Expand a mask that sequences may share to all sequences."""
    return None if real is None else real.expand(tokens.shape[:2])


def _has_two_dimensions(mask: Any, num_keys: int | Tensor) -> bool:
    """Return whether a mask is padding [B, T]; raise where it cannot be read."""
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask is a {type(mask).__name__}, of which a patched layer cannot read the "
            "padding; use the attention implementation 'sdpa' or 'eager'"
        )
    if not isinstance(num_keys, Tensor) and mask.shape[-1] < num_keys:
        raise ValueError(
            f"attention_mask covers {mask.shape[-1]} tokens, but there are {num_keys}: a mask of "
            "a sliding window cannot be honoured"
        )
    return mask.ndim == 2


def _selected(row: Tensor, num_queries: int, num_before: int | Tensor) -> Tensor:
    """The part of a row [B, T] about the new tokens, [B, N]."""
    return row.index_select(1, num_before + torch.arange(num_queries, device=row.device))


def _as_padding(
    seen: Tensor, num_queries: int, num_before: int | Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """The real ones [B, N] of the new tokens, and whether the mask says no more than that."""
    keys = torch.arange(seen.shape[-1], device=seen.device)
    inside = keys < num_before + num_queries
    row = seen[:, 0, -1] & inside  # the last token sees every real one
    real, expected = _selected(row, num_queries, num_before), row[:, None, None, :]
    if causal:
        queries = torch.arange(num_queries, device=seen.device)[:, None]
        expected = expected & (keys <= num_before + queries)
    return real, _fits(seen, expected, real, inside)


def _as_sequences(seen: Tensor, num_tokens: int, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Real tokens [B, N], the first token of the sequence of each, and whether that is all."""
    tokens = torch.arange(num_tokens, device=seen.device)
    own = seen[:, 0, :num_tokens, :num_tokens]
    real = own.diagonal(dim1=1, dim2=2)
    starts = own.int().argmax(-1)
    expected = (starts[:, :, None] == starts[:, None, :]) & real[:, None, :]
    if causal:
        expected = expected & (tokens <= tokens[:, None])
    inside = torch.ones_like(tokens, dtype=torch.bool)
    fits = _fits(seen[..., :num_tokens], expected[:, None], real, inside)
    return real, starts, fits & ~seen[..., num_tokens:].any()


def _fits(seen: Tensor, expected: Tensor, real: Tensor, inside: Tensor) -> Tensor:
    """True where real queries see what is expected, and no query a token that is not inside."""
    # Some hosts let a padded query see everything, to spare its softmax the division by zero.
    spared = ~real[:, None, :, None] & (seen | ~inside).all(-1, keepdim=True)
    return ((seen == expected) | spared).all() & ~(seen & ~inside).any()


def _require(fits: Tensor, *, causal: bool) -> None:
    form = "padding under a causal mask" if causal else "padding"
    _check(
        fits,
        f"the mask is more than {form}, which is all that this layer can honour, beside sequences "
        "packed in one pass without a cache and outside of compiled graphs. Masks of sliding "
        "windows or of blocks have no counterpart; a causal mask needs a layer built or patched "
        "with causal=True, a full one causal=False",
    )


def _check(condition: Tensor, message: str) -> None:
    """Raise unless the condition holds; a compiled graph raises when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise ValueError(message)
