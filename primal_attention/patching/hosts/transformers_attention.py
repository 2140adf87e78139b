"""The calling convention that the models of Hugging Face transformers share.

Letters: B batch, N tokens, D model dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from primal_attention.patching.adapter import PatchedAttention
from primal_attention.patching.hosts.rotation import rotated
from primal_attention.patching.inputs import Inputs, Packing
from primal_attention.patching.masks import rows_of, token_mask_of

if TYPE_CHECKING:  # it imports transformers
    from primal_attention.patching.state import StateLayer


class TransformersAttention(PatchedAttention):
    """Self-attention called as ``(hidden_states, attention_mask, past_key_values)``.

    Returns the outputs and None: there is no matrix of attention weights.
    """

    def __init__(self, mechanism: nn.Module, layer_idx: int | None):
        super().__init__(mechanism)
        self.layer_idx = layer_idx

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
        inputs = Inputs(hidden_states, None, position_embeddings)
        if past_key_values is None:
            bounds = others.get("cu_seq_lens_q")
            return self._attend_rows(inputs, attention_mask, bounds), None
        layer = self._layer(past_key_values)
        real = token_mask_of(
            attention_mask,
            num_queries=inputs.length,
            num_before=layer.num_tokens,
            causal=self.causal,
        )
        inputs = inputs._replace(mask=_of_all_rows(real, hidden_states))
        if layer.num_tokens or (self._decodes() and not self.training):
            return self._continue(inputs, layer), None
        y = self._attend(inputs)
        layer.postpone(
            inputs.each(Tensor.detach)
        )  # a training pass, which the objectives read, is seldom continued
        return y, None

    def _attend_rows(self, inputs: Inputs, mask: Any, bounds: Tensor | None) -> Tensor:
        """The outputs of rows that may hold several sequences each."""
        x = inputs.x
        real, packing = rows_of(mask, num_tokens=inputs.length, causal=self.causal)
        if bounds is not None and real is None and packing is None:
            packing = Packing.between(bounds, x)
        if packing is None:
            return self._attend(inputs._replace(mask=_of_all_rows(real, x)))
        return packing.pack(self._attend(packing.unpack(inputs)), like=x)

    def _attend(self, inputs: Inputs) -> Tensor:
        with rotated(inputs.rotation):
            y: Tensor = self.mechanism(inputs.x, token_mask=inputs.mask)
        return y

    def _layer(self, past_key_values: Any) -> StateLayer:
        from primal_attention.patching.state import state_layer

        if not self.causal or self.layer_idx is None:
            raise ValueError(
                "past_key_values was given to a layer that is not causal and cannot go on from it; "
                "pass use_cache=False"
            )
        return state_layer(past_key_values, self.layer_idx)

    def _decodes(self) -> bool:
        return hasattr(self.mechanism, "prefill")

    def _continue(self, inputs: Inputs, layer: StateLayer) -> Tensor:
        """The outputs of tokens that follow those of a layer of the cache, which moves on."""
        from primal_attention.patching.state import REMEMBERED

        N, state = inputs.length, layer.read(self._state_after)
        if inputs.x.shape[0] > 1 or torch.compiler.is_compiling():
            y, state = self._extend(inputs, state)
            layer.keep(state, N)
            return y
        ys, first = [], max(N - REMEMBERED, 0)
        if first:
            y, state = self._extend(inputs.part(0, first), state)
            layer.keep(state, first)
            ys.append(y)
        y, after = self._extend(inputs.part(first, N), state)
        layer.keep_with_way_back(after, state, inputs.copied(first, N))
        return torch.cat([*ys, y], 1)

    def _extend(self, inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        if not self._decodes():
            raise ValueError(
                f"{self.record.attention} has no decode state: use_cache=False for generation"
            )
        with rotated(inputs.rotation):
            y, state = self.mechanism.prefill(inputs.x, state, token_mask=inputs.mask)
        return y, state

    @torch.no_grad()
    def _state_after(self, inputs: Inputs, state: Any) -> Any:
        return self._extend(inputs, state)[1]


def _of_all_rows(real: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask of all rows, from one that they may share."""
    return None if real is None else real.expand(x.shape[:2])


def _refuse(others: dict[str, Any]) -> None:
    """Raise for arguments that change what attention is to do."""
    if others.get("encoder_hidden_states") is not None:
        raise ValueError("encoder_hidden_states was given to a self-attention that is patched")
