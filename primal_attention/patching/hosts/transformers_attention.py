"""The calling convention that the models of Hugging Face transformers share.

Letters: B batch, N tokens, D model dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from primal_attention.patching.adapter import PatchedAttention
from primal_attention.patching.hosts.collector import collected_weights
from primal_attention.patching.hosts.rotation import rotated
from primal_attention.patching.hosts.transformers_cache import (
    REMEMBERED,
    KeyShape,
    StateLayer,
    state_layer,
)
from primal_attention.patching.hosts.transformers_cache import register as register_state
from primal_attention.patching.hosts.transformers_padding import register as register_masks
from primal_attention.patching.inputs import Inputs, Packing
from primal_attention.patching.masks import rows_of, token_mask_of


class TransformersAttention(PatchedAttention):
    """Self-attention called as ``(hidden_states, attention_mask, past_key_values)``.

    Returns the outputs and None: there is no matrix of attention weights. Where the host collects
    such matrices, one without data stands for it.
    """

    def __init__(self, mechanism: nn.Module, layer_idx: int | None):
        super().__init__(mechanism)
        _register()
        self.layer_idx = layer_idx
        self.num_key_heads = int(mechanism.num_heads)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register()  # it may have come from another process

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
            y = self._attend_rows(inputs, attention_mask, bounds)
            self._show_weights(y, inputs.length)
            return y, None
        layer = self._layer(past_key_values, hidden_states.dtype)
        real = token_mask_of(
            attention_mask,
            num_queries=inputs.length,
            num_before=layer.num_tokens if layer.is_started else 0,
            causal=self.causal,
        )
        inputs = inputs._replace(mask=_of_all_rows(real, hidden_states))
        if layer.is_started or (self._decodes() and not self.training):
            y = self._continue(inputs, layer)
        else:  # a training pass, which the objectives read, is seldom continued
            y = self._attend(inputs)
            layer.postpone(inputs.each(Tensor.detach))
        self._show_weights(y, layer.get_mask_sizes(0)[0])
        return y, None

    def _show_weights(self, y: Tensor, num_keys: int) -> None:
        """Give the host a matrix [B, H, N, T] without data where it collects attention weights.

        It is on the ``meta`` device: its shape can be read, and its numbers cannot.
        """
        weights = collected_weights()
        if weights is not None:
            size = (y.shape[0], int(self.mechanism.num_heads), y.shape[1], num_keys)
            weights.append(torch.empty(size, dtype=y.dtype, device="meta"))

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

    def _layer(self, past_key_values: Any, dtype: torch.dtype) -> StateLayer:
        if not self.causal or self.layer_idx is None:
            raise ValueError(
                "past_key_values was given to a layer that is not causal and cannot go on from it; "
                "pass use_cache=False"
            )
        shape = KeyShape(self.num_key_heads, int(self.mechanism.head_dim), dtype)
        return state_layer(past_key_values, self.layer_idx, shape)

    def _decodes(self) -> bool:
        return hasattr(self.mechanism, "prefill")

    def _continue(self, inputs: Inputs, layer: StateLayer) -> Tensor:
        """The outputs of tokens that follow those of a layer of the cache, which moves on."""
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


def _register() -> None:
    register_masks()
    register_state()


def _of_all_rows(real: Tensor | None, x: Tensor) -> Tensor | None:
    """The mask of all rows, from one that they may share."""
    return None if real is None else real.expand(x.shape[:2])


def _refuse(others: dict[str, Any]) -> None:
    """Raise for arguments that change what attention is to do."""
    if others.get("encoder_hidden_states") is not None:
        raise ValueError("encoder_hidden_states was given to a self-attention that is patched")
