"""Other people's attention modules in the form that the contract checks.

An adapter only translates the call: names, the meaning of the mask, what is returned. It mends
nothing, so that the report is about the module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Adapter(nn.Module):
    """A module that is called in the way of its library; of a tuple the first is its output."""

    def __init__(self, attention: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.call = call
        self.contract_exemptions = getattr(attention, "contract_exemptions", {})

    def forward(self, *args: Tensor, **arguments: Tensor | None) -> Tensor:
        """Call the module with tokens, masks, and a context where it takes one."""
        output = self.call(self.attention, *args, **arguments)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return first


def adapt(module: nn.Module, adapter: str | None = None, *, causal: bool = False) -> nn.Module:
    """Adapt the module to the form of the contract.

    Args:
        module: Any attention module.
        adapter: One of `ADAPTERS`; None recognises `nn.MultiheadAttention` and leaves all others
            as they are.
        causal: Whether `nn.MultiheadAttention` gets a causal mask; the others are causal or not by
            themselves.

    Raises:
        ValueError: If there is no such adapter.
    """
    if adapter is None:
        if not isinstance(module, nn.MultiheadAttention):
            return module
        adapter = "mha"
    if adapter not in ADAPTERS:
        raise ValueError(f"adapter must be one of {', '.join(ADAPTERS)}, got {adapter!r}")
    call = ADAPTERS[adapter]
    return Adapter(module, partial(call, causal=causal) if call is _mha else call)


def _mha(
    attention: Any,
    x: Tensor,
    context: Tensor | None = None,
    *,
    token_mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    causal: bool = False,
) -> Any:
    """`nn.MultiheadAttention`: its mask is True at padding, its output a pair."""
    if context is None:
        context, context_mask = x, token_mask
    N, T = x.shape[1], context.shape[1]
    future = torch.ones(N, T, dtype=torch.bool, device=x.device).triu(1)
    if not attention.batch_first:
        x, context = x.transpose(0, 1), context.transpose(0, 1)
    output = attention(
        x,
        context,
        context,
        key_padding_mask=None if context_mask is None else ~context_mask,
        attn_mask=future if causal else None,
        need_weights=False,
    )[0]
    return output if attention.batch_first else output.transpose(0, 1)


def _hf(attention: nn.Module, x: Tensor, *, token_mask: Tensor | None = None) -> Any:
    """`forward(hidden_states, attention_mask)`, 1 at real tokens, 0 at padding, [B, N]."""
    mask = torch.ones_like(x[..., 0]) if token_mask is None else token_mask
    return attention(x, attention_mask=mask.long())


def _hf_additive(attention: nn.Module, x: Tensor, *, token_mask: Tensor | None = None) -> Any:
    """The mask is added to the scores: 0, and the least number at padding, [B, 1, 1, N]."""
    mask = torch.zeros_like(x[..., 0])
    if token_mask is not None:
        mask = mask.masked_fill(~token_mask, torch.finfo(x.dtype).min)
    return attention(x, attention_mask=mask[:, None, None])


def _lucidrains(attention: nn.Module, x: Tensor, *, token_mask: Tensor | None = None) -> Any:
    """`forward(x, mask=...)`, True at real tokens."""
    return attention(x) if token_mask is None else attention(x, mask=token_mask)


ADAPTERS: dict[str, Callable[..., Any]] = {
    "mha": _mha,
    "hf": _hf,
    "hf-additive": _hf_additive,
    "lucidrains": _lucidrains,
}
