"""The constant-size state of a patched layer, inside the cache of Hugging Face transformers.

Letters: B batch, N tokens, D model dim, C head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

REMEMBERED = 128
"""So many of the last tokens of a single sequence can be removed again."""


class Inputs(NamedTuple):
    """The tokens of one pass, their mask and their rotary positions."""

    x: Tensor  # [B, N, D]
    mask: Tensor | None = None  # [B, N], True at real tokens
    rotation: tuple[Tensor, Tensor] | None = None  # cosines and sines [B or 1, N, C], if rotary

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

    def copied(self, first: int, end: int) -> Inputs:
        """Copy some of the tokens, without the memory of the others and without a graph."""
        return self.each(lambda tensor: tensor.detach()[:, first:end].clone())


def joined(several: Sequence[Inputs]) -> Inputs:
    """Join the tokens of several passes as if they had come in one."""
    if len(several) == 1:
        return several[0]
    x = torch.cat([each.x for each in several], 1)
    mask = None
    if any(each.mask is not None for each in several):
        real = [
            each.x.new_ones(each.x.shape[:2], dtype=torch.bool) if each.mask is None else each.mask
            for each in several
        ]
        mask = torch.cat(real, 1)
    rotations = [each.rotation for each in several if each.rotation is not None]
    if not rotations:
        return Inputs(x, mask)
    cos, sin = (torch.cat(part, 1) for part in zip(*rotations, strict=True))
    return Inputs(x, mask, (cos, sin))


Extend = Callable[[Inputs, Any], Any]
"""From more tokens and the state before them to the state after them."""


class KeyShape(NamedTuple):
    """Shape and dtype of the keys that the host would have put into the cache."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass
class _Stretch:
    """Tokens that can be removed again, and the state before them."""

    before: Any
    passes: list[Inputs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(inputs.length for inputs in self.passes)


class StateLayer:
    """One layer of a ``Cache``: the state of a mechanism in place of keys and values.

    It answers what generation asks of a layer (its number of tokens; to reorder or repeat its
    sequences; to remove the last tokens of a draft) and holds a NamedTuple of tensors of constant
    size, for mechanisms that have such a state. Sums cannot be taken back, so the last tokens of a
    single sequence are kept beside the state before them.

    ``keys`` and ``values`` are tensors on the ``meta`` device, which have the shape and the dtype
    that the host's would have, and no data.
    """

    is_initialized = is_croppable = True
    is_compileable = is_sliding = supports_early_init = False

    def __init__(self, shape: KeyShape) -> None:
        self.shape = shape
        self.num_tokens: Any = 0  # an int
        self.state: Any = None  # None before the first token, or where it is yet to be computed
        self._stretches: list[_Stretch] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_layers()  # it may come from another process

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_tokens={int(self.num_tokens)})"

    @property
    def is_started(self) -> bool:
        """True once there were tokens."""
        return self.state is not None or bool(self._stretches)

    @property
    def batch_size(self) -> int:
        """Number of sequences, once there are tokens."""
        first = self._stretches[-1].passes[0].x if self.state is None else self.state[0]
        return int(first.shape[0])

    @property
    def keys(self) -> Tensor | None:
        """The shape of the keys (and values) of all tokens so far, without data."""
        if not self.is_started:
            return None
        size = (self.batch_size, self.shape.num_heads, self._num_keys(), self.shape.head_dim)
        return torch.empty(size, dtype=self.shape.dtype, device="meta")

    values = keys

    def read(self, extend: Extend) -> Any:
        """Return the state after the tokens so far; None before the first."""
        if self.state is None and self._stretches:
            stretch = self._stretches[-1]
            self.state = extend(joined(stretch.passes), stretch.before)
        return self.state

    def keep(self, state: Any, num_new: int) -> None:
        """Keep the state after so many more tokens, which cannot be removed again."""
        self.state, self._stretches = state, []
        self.num_tokens += num_new

    def keep_with_way_back(self, state: Any, before: Any, new: Inputs) -> None:
        """Keep the state after the tokens of a pass, which can be removed again."""
        if not self._stretches or self._stretches[-1].length >= REMEMBERED:
            self._stretches = [*self._stretches[-1:], _Stretch(before)]
        self._stretches[-1].passes.append(new)
        self.state = state
        self.num_tokens += new.length

    def postpone(self, new: Inputs) -> None:
        """Keep the tokens of a first pass, which is not likely to be continued."""
        self.state, self._stretches = None, [_Stretch(None, [new])]
        self.num_tokens += new.length

    def get_seq_length(self) -> Any:
        """Number of tokens so far."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask of so many new tokens."""
        return self.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: there is no upper bound."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.num_tokens, self.state, self._stretches = 0, None, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the sequences, as beam search does."""
        self._change(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._change(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._change(lambda t: t[indices.to(t.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens.

        A positive number is the number of tokens that stay, as it was in transformers before 5.
        """
        if tokens_to_remove > 0:
            tokens_to_remove = min(tokens_to_remove - self.num_tokens, 0)
        remaining = -tokens_to_remove
        if not remaining:
            return
        if remaining >= self.num_tokens:
            self.reset()
            return
        known = sum(stretch.length for stretch in self._stretches)
        if remaining > known:
            raise ValueError(
                f"cannot remove {remaining} of {self.num_tokens} tokens from the state of a "
                f"patched layer, which is a sum over all of them; {known} can be removed here, at "
                f"least {REMEMBERED} where generation of a single sequence went so far. Keep "
                "copy.deepcopy(past_key_values) of the place to return to"
            )
        self.num_tokens -= remaining
        while remaining:
            stretch = self._stretches[-1]
            last = stretch.passes.pop()
            if last.length > remaining:
                stretch.passes.append(last.copied(0, last.length - remaining))
            remaining -= min(remaining, last.length)
            self.state = None if stretch.passes else stretch.before
            if not stretch.passes:
                self._stretches.pop()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first pass makes the state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refuse keys and values: they come from a layer that is not patched."""
        raise ValueError(
            "this layer of past_key_values holds the state of a patched layer, which takes no keys "
            "and values; start a model that is not patched with an empty cache"
        )

    def offload(self) -> None:
        """Do nothing: the state is small."""

    prefetch = offload

    def _num_keys(self) -> int:
        return int(self.num_tokens)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        def changed(state: Any) -> Any:
            return None if state is None else type(state)(*map(change, state))

        if self.state is not None:
            self.state, self._stretches = changed(self.state), []
            return
        for stretch in self._stretches:
            stretch.before = changed(stretch.before)
            stretch.passes = [inputs.each(change) for inputs in stretch.passes]


class StaticStateLayer(StateLayer):
    """A layer of a cache of fixed size, for graphs that are compiled once for all tokens.

    The number of tokens is a tensor, and the state stays where it is in memory.
    """

    is_compileable, is_croppable = True, False

    def __init__(self, shape: KeyShape, max_tokens: int) -> None:
        super().__init__(shape)
        self.max_tokens = max_tokens
        self.num_tokens = torch.tensor(0)

    def keep(self, state: Any, num_new: int) -> None:
        """Overwrite the state, in place unless it is the first or has grown."""
        held = self.state
        if held is None or any(a.shape != b.shape for a, b in zip(held, state, strict=True)):
            self.state = type(state)(*(tensor.clone() for tensor in state))
            self.num_tokens = self.num_tokens.to(state[0].device)
            if not torch.compiler.is_compiling():
                for tensor in (*self.state, self.num_tokens):  # CUDA graphs take them in place
                    torch._dynamo.mark_static_address(tensor)
        else:
            for old, new in zip(held, state, strict=True):
                old.copy_(new)
        self._stretches = []
        self.num_tokens.add_(num_new)

    def keep_with_way_back(self, state: Any, before: Any, new: Inputs) -> None:
        """Keep the state alone: no tokens are removed from a cache of fixed size."""
        self.keep(state, new.length)

    def get_seq_length(self) -> Any:
        """Number of tokens so far: a tensor from the first on."""
        return self.num_tokens if self.is_started else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask, which covers the whole cache."""
        return self.max_tokens, 0

    def get_max_length(self) -> int:
        """Return the size of the cache."""
        return self.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: no way back is kept."""
        if tokens_to_remove:
            raise ValueError("tokens cannot be removed from a cache of fixed size")

    def reset(self) -> None:
        """Forget all tokens."""
        self.num_tokens.zero_()
        self.state, self._stretches = None, []

    def _num_keys(self) -> int:
        return self.max_tokens


def register_layers() -> None:
    """Make transformers take these layers for layers of a cache, before any graph is traced."""
    from transformers.cache_utils import CacheLayerMixin

    CacheLayerMixin.register(StateLayer)


def state_layer(cache: Any, index: int, shape: KeyShape) -> StateLayer:
    """Return a layer of a cache by its index, replaced by a state layer if it is none yet."""
    from transformers.cache_utils import StaticLayer

    cache = getattr(cache, "self_attention_cache", cache)
    layers = cache.layers
    while len(layers) <= index:
        layers.append(cache.layer_class_to_replicate())
    there = layers[index]
    if not isinstance(there, StateLayer):
        if there.get_seq_length():
            raise ValueError(
                f"layer {index} of past_key_values holds keys and values of another model; start "
                "a patched model with an empty cache"
            )
        static = isinstance(there, StaticLayer)
        there = StaticStateLayer(shape, there.max_cache_len) if static else StateLayer(shape)
        layers[index] = there
    found: StateLayer = there
    return found
