"""Where every attention of a Hugging Face model is patched, its mask need not be N x N.

Such a model gets an attention implementation of its own, under which it hands the padding [B, N] to
its layers as it came. Masks that are more than padding are still spelled out for the layers to see.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from primal_attention.patching.adapter import PatchedAttention

_SUFFIX = "_padding"


def choose_masks(model: nn.Module) -> None:
    """Have the padding passed as it is where no attention needs more, else as the host does."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    if config is None or not isinstance(chosen, str):
        return
    name = chosen.removesuffix(_SUFFIX)
    if name in ("eager", "sdpa") and _all_patched(model):
        from transformers import AttentionMaskInterface

        name += _SUFFIX
        AttentionMaskInterface.register(name, _padding_mask)
    if name != chosen:
        config._attn_implementation = name


def _padding_mask(*, mask_function: Any, attention_mask: Any = None, **sizes: Any) -> Any:
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        sdpa_mask,
    )

    if mask_function in (bidirectional_mask_function, causal_mask_function):
        return attention_mask
    return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **sizes)


def _all_patched(model: nn.Module) -> bool:
    """Whether there are patched layers, and nothing beside them that looks like attention."""
    if isinstance(model, PatchedAttention):
        return True
    inside = [_all_patched(child) for child in model.children() if _has_attention(child)]
    return bool(inside) and all(inside)


def _has_attention(module: nn.Module) -> bool:
    return any(
        isinstance(each, PatchedAttention) or "attention" in type(each).__name__.lower()
        for each in module.modules()
    )
