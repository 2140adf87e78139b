"""The constant-size state of a patched layer, inside the cache of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class StateLayer:
    """One layer of a ``Cache``: the state of a mechanism in place of keys and values.

    It answers what generation asks of a layer (how many tokens it has seen, to reorder or repeat
    its sequences) and holds a NamedTuple of tensors whose size does not grow, for mechanisms that
    have such a state.
    """

    keys = values = None
    is_initialized = True
    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self) -> None:
        self.num_tokens = 0
        self._state: Any = None
        self._make: Callable[[], Any] | None = None

    def __repr__(self) -> str:
        return f"StateLayer(num_tokens={self.num_tokens})"

    def read(self) -> Any:
        """The state after the tokens so far; None before the first."""
        if self._make is not None:
            self._state, self._make = self._make(), None
        return self._state

    def keep(self, state: Any, num_new: int) -> None:
        """Keep the state after so many more tokens."""
        self._state, self._make = state, None
        self.num_tokens += num_new

    def postpone(self, make: Callable[[], Any], num_new: int) -> None:
        """Keep how to make the state, for a pass that is not likely to be continued."""
        self.keep(None, num_new)
        self._make = make

    def get_seq_length(self) -> int:
        """How many tokens were seen."""
        return self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the mask of so many new tokens."""
        return self.num_tokens + query_length, 0

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def reset(self) -> None:
        """Forget all tokens."""
        self.num_tokens, self._state, self._make = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences in another order, as beam search does."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        self._map(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some of the sequences."""
        self._map(lambda t: t[indices.to(t.device)])

    def crop(self, tokens_to_remove: int) -> None:
        """Sums cannot be undone: an error unless there is nothing to remove."""
        if tokens_to_remove:
            raise ValueError(
                f"cannot remove {tokens_to_remove} tokens from the state of a patched layer, which "
                "is a sum over all of them (assisted generation needs to)"
            )

    def offload(self) -> None:
        """The state stays where it is: it is small."""

    def prefetch(self) -> None:
        """Nothing was moved away."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        state = self.read()
        if state is not None:
            self._state = type(state)(*(change(tensor) for tensor in state))


def state_layer(cache: Any, index: int) -> StateLayer:
    """The layer of that index of a cache, made one of ours if it is not yet."""
    from transformers.cache_utils import CacheLayerMixin

    CacheLayerMixin.register(StateLayer)
    cache = getattr(cache, "self_attention_cache", cache)
    layers = cache.layers
    while len(layers) <= index:
        layers.append(cache.layer_class_to_replicate())
    if not isinstance(layers[index], StateLayer):
        if layers[index].get_seq_length():
            raise ValueError(
                f"layer {index} of past_key_values holds keys and values of another model; start "
                "a patched model with an empty cache"
            )
        layers[index] = StateLayer()
    found: StateLayer = layers[index]
    return found
