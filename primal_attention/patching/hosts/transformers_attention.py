"""The calling convention that the models of Hugging Face transformers share.

Letters: B batch, N tokens, D model dim, H heads, C head dim.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from primal_attention.attention.base.compaction import padded
from primal_attention.patching.hosts.host import PatchedAttention
from primal_attention.patching.hosts.transformers_padding import register_padding
from primal_attention.patching.masks import expanded, rows_of, token_mask_of

if TYPE_CHECKING:
    from primal_attention.patching.hosts.transformers_cache import StateLayer

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines [B or 1, N, C] of the positions, as the host passes them."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_global", "k_global", "v_global")
_running = threading.local()


class Inputs(NamedTuple):
    """The tokens of one pass, their mask and their rotary positions."""

    x: Tensor  # [B, N, D]
    mask: Tensor | None = None  # [B, N], True at real tokens
    rotation: Rotation | None = None

    @property
    def length(self) -> int:
        """N."""
        return self.x.shape[1]

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply the same change to each tensor, expanded to the batch B."""
        mask = None if self.mask is None else change(self.mask)
        rotation = self.rotation
        if rotation is not None:
            cos, sin = (part.expand(self.x.shape[0], -1, -1) for part in rotation)
            rotation = change(cos), change(sin)
        return Inputs(change(self.x), mask, rotation)

    def followed_by(self, more: Inputs) -> Inputs:
        """Join the tokens of two passes as if they had come in one."""
        masks = [
            torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask
            for x, mask, _ in (self, more)
        ]
        rotation = None
        if self.rotation is not None and more.rotation is not None:
            cos, sin = (torch.cat(two, 1) for two in zip(self.rotation, more.rotation, strict=True))
            rotation = cos, sin
        return Inputs(torch.cat([self.x, more.x], 1), torch.cat(masks, 1), rotation)


class TransformersAttention(PatchedAttention):
    """Self-attention called as ``(hidden_states, attention_mask, past_key_values)``.

    Returns the outputs and None: there is no matrix of attention weights. Where the host collects
    such matrices, one without data stands for it.
    """

    shows_weights = True

    def __init__(self, mechanism: nn.Module, module: nn.Module):
        super().__init__(mechanism)
        register_padding()
        self.layer_idx: int | None = getattr(module, "layer_idx", None)
        self.num_key_heads = int(mechanism.num_heads)  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register_padding()  # it may come from another process

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_embeddings: Rotation | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention outputs [B, N, D] of the tokens that follow those of the cache."""
        for name in ("encoder_hidden_states", "key_value_states"):
            if others.get(name) is not None:
                raise ValueError(f"{name} was given to a self-attention that is patched")
        inputs = Inputs(hidden_states, None, position_embeddings)
        if past_key_values is None:
            past_key_values = others.get("layer_past")  # its name in GPT-NeoX
        if past_key_values is None:
            y = self._attend_rows(inputs, attention_mask, others.get("cu_seq_lens_q"))
            self._show_weights(y, inputs.length)
            return y, None
        layer = self._layer(past_key_values, hidden_states.dtype)
        real = token_mask_of(
            attention_mask,
            num_queries=inputs.length,
            num_before=layer.num_tokens if layer.is_started else 0,
            causal=self.causal,
        )
        inputs = inputs._replace(mask=expanded(real, hidden_states))
        if layer.is_started or (hasattr(self.mechanism, "prefill") and not self.training):
            y = self._continue(inputs, layer)
        else:  # a training pass, which the objectives read, is seldom continued
            y = self._attend(inputs)
            layer.postpone(inputs.each(Tensor.detach))
        self._show_weights(y, layer.get_mask_sizes(0)[0])
        return y, None

    def _show_weights(self, y: Tensor, num_keys: int) -> None:
        """Append a matrix [B, H, N, T] on the ``meta`` device where the host collects weights.

        The host hooks modules by their class, so a layer of another class has to report by itself.
        """
        from transformers.utils.output_capturing import _active_collector

        if not self.shows_weights or (
            torch.compiler.is_compiling() and not _active_collector.compiling
        ):
            return  # the graph of one layer, or without collection, has no context to look into
        outputs = _active_collector.get()  # type: ignore[no-untyped-call, unused-ignore]
        weights = None if outputs is None else outputs.get("attentions")
        if weights is not None:
            size = (y.shape[0], int(self.mechanism.num_heads), y.shape[1], num_keys)
            weights.append(torch.empty(size, dtype=y.dtype, device="meta"))

    def _attend_rows(self, inputs: Inputs, mask: Any, bounds: Tensor | None) -> Tensor:
        """Attend within rows that may hold several sequences each."""
        x = inputs.x
        real, rows = rows_of(mask, num_tokens=inputs.length, causal=self.causal)
        if bounds is not None and real is None and rows is None:
            rows = padded(bounds.long(), x.shape[0] * x.shape[1], int(bounds.diff().max()))
            rows = rows._replace(before=tuple(x.shape[:2]))
        if rows is None or rows.there is None:
            return self._attend(inputs._replace(mask=expanded(real, x)))
        inputs = inputs.each(rows.pack)._replace(mask=rows.there.view(rows.shape) >= 0)
        return rows.unpack(self._attend(inputs))

    def _attend(self, inputs: Inputs) -> Tensor:
        with rotated(inputs.rotation):
            y: Tensor = self.mechanism(inputs.x, token_mask=inputs.mask)
        return y

    def _layer(self, past_key_values: Any, dtype: torch.dtype) -> StateLayer:
        from primal_attention.patching.hosts.transformers_cache import state_layer

        if not self.causal or self.layer_idx is None:
            raise ValueError(
                "past_key_values was given to a layer that is not causal and cannot go on from it; "
                "pass use_cache=False"
            )
        size = (1, self.num_key_heads, 1, int(self.mechanism.head_dim))
        key = torch.empty(size, dtype=dtype, device="meta")
        return state_layer(past_key_values, self.layer_idx, key)

    def _continue(self, inputs: Inputs, layer: StateLayer) -> Tensor:
        """Attend to tokens that follow those of a layer of the cache, and advance its state.

        The last tokens of a long pass come by themselves, so that they can be removed again.
        """
        single = inputs.x.shape[0] == 1 and not torch.compiler.is_compiling()
        first = max(inputs.length - layer.remembered, 0) if single else 0
        ends = [slice(first), slice(first, None)] if first else [slice(None)]
        ys = []
        for part in ends:
            new = inputs.each(lambda tensor, part=part: tensor[:, part])  # type: ignore[misc]
            with torch.no_grad():
                state = layer.read(lambda *given: self._extend(*given)[1])
            y, state = self._extend(new, state)
            layer.keep(state, new)
            ys.append(y)
        return torch.cat(ys, 1)

    def _extend(self, inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        if not hasattr(self.mechanism, "prefill"):
            raise ValueError(
                f"{self.attention} has no decode state: use_cache=False for generation"
            )
        with rotated(inputs.rotation):
            y, state = self.mechanism.prefill(inputs.x, state, token_mask=inputs.mask)
        return y, state


class AlbertAttention(TransformersAttention):
    """An attention that adds its input and normalises the sum by itself."""

    def __init__(self, mechanism: nn.Module, module: nn.Module):
        super().__init__(mechanism, module)
        self.norm = deepcopy(module.get_submodule("LayerNorm"))

    def forward(self, hidden_states: Tensor, *args: Any, **others: Any) -> tuple[Tensor, None]:
        """Return the normalised sum of input and attention."""
        y, _ = super().forward(hidden_states, *args, **others)
        return self.norm(hidden_states + y), None


class RotaryAttention(TransformersAttention):
    """The projections under the names of the host, then norms, rotation and groups as it has them.

    The mechanism sees queries and keys after all of this, before its feature map.
    """

    query_factor = 1.0  # of queries that a norm would rid of it if it were in their projection

    def __init__(self, mechanism: nn.Module, module: nn.Module):
        super().__init__(mechanism, module)
        self.num_heads, self.head_dim = int(mechanism.num_heads), int(mechanism.head_dim)  # type: ignore[arg-type]
        groups = getattr(module.config, "num_key_value_heads", None)
        self.num_key_heads = self.num_heads if groups is None else int(groups)
        code = sys.modules[type(module).__module__]
        self._rotate: Callable[..., tuple[Tensor, Tensor]] = code.apply_rotary_pos_emb
        for name in ("q_norm", "k_norm"):
            if hasattr(module, name):
                self.add_module(name, deepcopy(module.get_submodule(name)))
        for name in _PROJECTIONS:
            if hasattr(mechanism, name):
                self.add_module(name, mechanism.get_submodule(name))
                delattr(mechanism, name)
                setattr(mechanism, name, HeadProjection(self, name))

    def project(self, name: str, x: Tensor) -> Tensor:
        """Queries, keys or values [B, N, H C] as the mechanism gets them."""
        z: Tensor = self.get_submodule(name)(x)
        norm: Any = None if name.startswith("v") else getattr(self, f"{name[0]}_norm", None)
        of_all_heads = norm is not None and norm.weight.numel() == z.shape[-1]
        z = norm(z) if of_all_heads else z
        z = rearrange(z, "b n (h c) -> b h n c", c=self.head_dim)
        if not name.startswith("v"):
            z = z if norm is None or of_all_heads else norm(z)
            rotation = running_rotation()
            assert rotation is not None
            z, _ = self._rotate(z, z[:, :0], *rotation)
            z = z * self.query_factor if name.startswith("q") else z
        z = z.repeat_interleave(self.num_heads // z.shape[1], dim=1)
        return rearrange(z, "b h n c -> b n (h c)")


class HeadProjection:
    """A callable in the place of a projection of the mechanism; the owner keeps the module."""

    def __init__(self, owner: RotaryAttention, name: str):
        self.owner, self.name = owner, name

    @property
    def weight(self) -> Tensor:
        """A weight of the shape [H C, D] that a projection without groups has."""
        weight: Tensor = self.owner.get_submodule("q_proj").weight  # type: ignore[assignment]
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadProjection:
        """Refer to the copy of the owner where it is copied too, else to the owner itself."""
        return HeadProjection(memo.get(id(self.owner), self.owner), self.name)

    def __call__(self, x: Tensor) -> Tensor:
        """The projected tokens [B, N, H C]."""
        return self.owner.project(self.name, x)


@contextmanager
def rotated(rotation: Rotation | None) -> Iterator[None]:
    """Rotate the projections while the block runs, in this thread alone.

    The mechanism calls its projections with tokens and nothing else, so the rotation of a pass
    reaches them beside it. A context variable would do the same, but cannot be compiled.
    """
    _running.rotation = rotation
    try:
        yield
    finally:
        _running.rotation = None


def running_rotation() -> Rotation | None:
    """Return the rotation of the pass that runs in this thread."""
    return getattr(_running, "rotation", None)
