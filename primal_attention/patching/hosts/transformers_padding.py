"""Padding masks without N x N for Hugging Face models whose every attention is patched.

Such a model gets an attention implementation of its own, under which it hands the padding [B, N] to
its layers as it came. Masks that are more than padding are still spelled out for the layers to see.

Letters: B batch, H heads, N queries, T keys, C head dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.patching.hosts.host import PatchedAttention

_HOST, _NAME = "sdpa", "sdpa_padding"


def choose_masks(model: nn.Module) -> None:
    """Pass the padding as it is where no attention needs more, else the masks of the host."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "_attn_implementation", None)
    if config is None or chosen not in (_HOST, _NAME):
        return
    register_padding()
    name = _NAME if _all_patched(model) else _HOST
    if name != chosen:
        config._attn_implementation = name


def register_padding() -> None:
    """Make the implementation known to transformers.

    A model that is built from the config of a patched one has it too, with the host's attentions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionMaskInterface.register(_NAME, _padding_mask)
    AttentionInterface.register(_NAME, _attend)


def _padding_mask(**asked: Any) -> Any:
    """Return the padding as it came, unless the mask is more or the cache has a fixed size."""
    from transformers import masking_utils as host

    causal, full = host.causal_mask_function, host.bidirectional_mask_function
    offset = asked.get("q_offset", 0)
    grows = not isinstance(offset, Tensor) and asked.get("kv_offset", 0) == 0
    plain = asked["mask_function"] in (causal, full)
    if plain and grows and asked["kv_length"] == offset + asked["q_length"]:
        return asked.get("attention_mask")
    if not grows:  # no mask would mean that the queries come last
        asked["allow_is_causal_skip"] = False
    return host.sdpa_mask(**asked)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run the host's own attention of an unpatched module, which needs its mask spelled out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    N, T = query.shape[2], key.shape[2]
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if (attention_mask is None and causal and 1 < N < T) or getattr(attention_mask, "ndim", 4) == 2:
        seen = query.new_ones(1, 1, N, T, dtype=torch.bool)
        seen = seen.tril(T - N) if causal else seen
        if attention_mask is not None:
            seen = seen & (attention_mask[:, None, None, :T] > 0)
        attention_mask = seen | ~seen.any(-1, keepdim=True)  # one that would see none sees all
    others["is_causal"] = causal and attention_mask is None and N > 1
    return sdpa_attention_forward(module, query, key, value, attention_mask, **others)


def _all_patched(model: nn.Module) -> bool:
    """True if there are patched layers, and no other modules that look like attention."""
    if isinstance(model, PatchedAttention):
        return True
    inside = [_all_patched(child) for child in model.children() if _has_attention(child)]
    return bool(inside) and all(inside)


def _has_attention(module: nn.Module) -> bool:
    return any(
        isinstance(each, PatchedAttention) or "attention" in type(each).__name__.lower()
        for each in module.modules()
    )
