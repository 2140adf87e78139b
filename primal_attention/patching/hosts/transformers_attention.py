"""The calling convention that the models of Hugging Face transformers share.

Letters: B batch, N tokens, D model dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.patching.adapter import PatchedAttention
from primal_attention.patching.masks import token_mask_of
from primal_attention.patching.state import StateLayer, state_layer

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


class TransformersAttention(PatchedAttention):
    """Self-attention called as ``(hidden_states, attention_mask, past_key_values)``.

    Returns the outputs and None: there is no matrix of attention weights.
    """

    def __init__(self, mechanism: nn.Module, layer_idx: int | None):
        super().__init__(mechanism)
        self.layer_idx = layer_idx
        self.positions: tuple[Tensor, Tensor] | None = None  # of the pass that is running

    @classmethod
    def of(cls, module: nn.Module, mechanism: nn.Module) -> TransformersAttention:
        """In the place of a module of the host."""
        return cls(mechanism, getattr(module, "layer_idx", None))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention outputs [B, N, D] of the tokens that follow those of the cache."""
        _refuse(others)
        layer = None if past_key_values is None else self._layer(past_key_values)
        num_new = hidden_states.shape[1]
        token_mask = token_mask_of(
            attention_mask,
            num_queries=num_new,
            num_before=0 if layer is None else layer.num_tokens,
            causal=self.causal,
        )
        if token_mask is not None:  # some hosts have one mask for all sequences
            token_mask = token_mask.expand(hidden_states.shape[:2])
        if layer is not None and (layer.num_tokens or (self._decodes() and not self.training)):
            y, state = self._extend(hidden_states, layer.read(), token_mask, position_embeddings)
            layer.keep(state, num_new)
            return y, None
        self.positions = position_embeddings
        y = self.mechanism(hidden_states, token_mask=token_mask)
        self.positions = None
        if layer is not None:  # a training pass, which the objectives read, is seldom continued
            x = hidden_states.detach()
            layer.postpone(partial(self._state, x, token_mask, position_embeddings), num_new)
        return y, None

    def _layer(self, past_key_values: Any) -> StateLayer:
        if not self.causal or self.layer_idx is None:
            raise ValueError(
                "past_key_values was given to a layer that is not causal and cannot go on from it; "
                "pass use_cache=False"
            )
        return state_layer(past_key_values, self.layer_idx)

    def _decodes(self) -> bool:
        return hasattr(self.mechanism, "prefill")

    def _extend(
        self,
        x: Tensor,
        state: Any,
        token_mask: Tensor | None,
        positions: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Any]:
        if not self._decodes():
            raise ValueError(
                f"{self.record.attention} has no decode state: use_cache=False for generation"
            )
        self.positions = positions
        y, state = self.mechanism.prefill(x, state, token_mask=token_mask)
        self.positions = None
        return y, state

    @torch.no_grad()
    def _state(
        self,
        x: Tensor,
        token_mask: Tensor | None,
        positions: tuple[Tensor, Tensor] | None,
    ) -> Any:
        return self._extend(x, None, token_mask, positions)[1]


def _refuse(others: dict[str, Any]) -> None:
    """Raise for arguments that change what attention is to do."""
    if others.get("encoder_hidden_states") is not None:
        raise ValueError("encoder_hidden_states was given to a self-attention that is patched")
    packed = [name for name in _PACKED if others.get(name) is not None]
    if packed:
        raise ValueError(f"{packed[0]} was given: patched layers cannot honour packed sequences")
