"""Other people's attention modules in the form that the contract checks.

An adapter only translates the call: names, the meaning of the mask, what is returned. It mends
nothing, so that the report is about the module.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Adapter(nn.Module):
    """A module `attention` behind `forward(x, *, token_mask=None)`."""

    contract_exemptions: Mapping[str, str]

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.contract_exemptions = getattr(attention, "contract_exemptions", {})


class MultiheadAdapter(Adapter):
    """`nn.MultiheadAttention`: its mask is True at padding, its output a pair.

    Args:
        attention: The module, batch first or not.
        causal: Whether to give it a causal mask, which it has no option for.
    """

    attention: nn.MultiheadAttention

    def __init__(self, attention: nn.Module, *, causal: bool = False) -> None:
        super().__init__(attention)
        self.causal = causal

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        token_mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Self-attention, or attention to the context."""
        if context is None:
            context, context_mask = x, token_mask
        N, T = x.shape[1], context.shape[1]
        future = torch.ones(N, T, dtype=torch.bool, device=x.device).triu(1)
        if not self.attention.batch_first:
            x, context = x.transpose(0, 1), context.transpose(0, 1)
        output: Tensor = self.attention(
            x,
            context,
            context,
            key_padding_mask=None if context_mask is None else ~context_mask,
            attn_mask=future if self.causal else None,
            need_weights=False,
        )[0]
        return output if self.attention.batch_first else output.transpose(0, 1)


class HuggingFaceAdapter(Adapter):
    """`forward(hidden_states, attention_mask)` as in transformers; of a tuple the first is taken.

    Args:
        attention: The module.
        additive: Whether its mask is added to the scores, 0 at real tokens and the least number at
            padding, [B, 1, 1, N]; otherwise it is 1 at real tokens and 0 at padding, [B, N].
    """

    def __init__(self, attention: nn.Module, *, additive: bool = False) -> None:
        super().__init__(attention)
        self.additive = additive

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Self-attention; without a mask, one that masks nothing is passed."""
        real = torch.ones_like(x[..., 0], dtype=torch.bool) if token_mask is None else token_mask
        mask = real.long()
        if self.additive:
            least = torch.finfo(x.dtype).min
            mask = torch.zeros_like(x[..., 0]).masked_fill(~real, least)[:, None, None]
        output = self.attention(x, attention_mask=mask)
        first: Tensor = output if isinstance(output, Tensor) else output[0]
        return first


class LucidrainsAdapter(Adapter):
    """`forward(x, mask=...)` with a boolean mask, True at real tokens."""

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
        """Self-attention."""
        output: Tensor = (
            self.attention(x) if token_mask is None else self.attention(x, mask=token_mask)
        )
        return output


ADAPTERS = ("mha", "hf", "hf-additive", "lucidrains")
"""The names that `adapt` knows."""


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
        adapter = "mha" if isinstance(module, nn.MultiheadAttention) else None
    match adapter:
        case None:
            return module
        case "mha":
            return MultiheadAdapter(module, causal=causal)
        case "hf" | "hf-additive":
            return HuggingFaceAdapter(module, additive=adapter == "hf-additive")
        case "lucidrains":
            return LucidrainsAdapter(module)
    raise ValueError(f"adapter must be one of {', '.join(ADAPTERS)}, got {adapter!r}")
