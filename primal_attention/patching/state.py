"""The constant-size state of a patched layer, inside the cache of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from primal_attention.patching.inputs import Inputs, joined

REMEMBERED = 128
"""So many of the last tokens of a single sequence can be removed again."""

Extend = Callable[[Inputs, Any], Any]
"""The state after more tokens, from these and the state before them."""


@dataclass
class _Stretch:
    """Tokens that can be removed again, and the state before them."""

    before: Any
    passes: list[Inputs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return sum(inputs.length for inputs in self.passes)


class StateLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer of a ``Cache``: the state of a mechanism in place of keys and values.

    It answers what generation asks of a layer (how many tokens it has seen, to reorder or repeat
    its sequences, to remove the last tokens of a draft) and holds a NamedTuple of tensors whose
    size does not grow, for mechanisms that have such a state. Sums cannot be taken back, so the
    last tokens of a single sequence are kept beside the state before them.
    """

    is_initialized = is_croppable = True
    is_compileable = is_sliding = supports_early_init = False

    def __init__(self) -> None:
        self.keys = self.values = None
        self.num_tokens = 0
        self.state: Any = None  # None before the first token, or where it is yet to be computed
        self._stretches: list[_Stretch] = []

    def __repr__(self) -> str:
        return f"StateLayer(num_tokens={self.num_tokens})"

    def read(self, extend: Extend) -> Any:
        """The state after the tokens so far; None before the first."""
        if self.state is None and self.num_tokens:
            stretch = self._stretches[-1]
            self.state = extend(joined(stretch.passes), stretch.before)
        return self.state

    def keep(self, state: Any, num_new: int) -> None:
        """Keep the state after so many more tokens, and no way back from it."""
        self.state, self._stretches = state, []
        self.num_tokens += num_new

    def keep_with_way_back(self, state: Any, before: Any, new: Inputs) -> None:
        """Keep the state after the tokens of a pass, and what it takes to remove some of them."""
        if not self._stretches or self._stretches[-1].length >= REMEMBERED:
            self._stretches = [*self._stretches[-1:], _Stretch(before)]
        self._stretches[-1].passes.append(new)
        self.state = state
        self.num_tokens += new.length

    def postpone(self, new: Inputs) -> None:
        """Keep the tokens of a first pass, which is not likely to be continued."""
        self.state, self._stretches = None, [_Stretch(None, [new])]
        self.num_tokens += new.length

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
        self.num_tokens, self.state, self._stretches = 0, None, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences in another order, as beam search does."""
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
        self._check_way_back(remaining)
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
        """Nothing: the first pass makes the state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> NoReturn:
        """Refuse keys and values: they come from a layer that is not patched."""
        raise ValueError(
            "this layer of past_key_values holds the state of a patched layer, which takes no keys "
            "and values; start a model that is not patched with an empty cache"
        )

    def offload(self) -> None:
        """The state stays where it is: it is small."""

    def prefetch(self) -> None:
        """Nothing was moved away."""

    def _check_way_back(self, number: int) -> None:
        known = sum(stretch.length for stretch in self._stretches)
        if number > known:
            raise ValueError(
                f"cannot remove {number} of {self.num_tokens} tokens from the state of a patched "
                f"layer, which is a sum over all of them; {known} can be removed here, at least "
                f"{REMEMBERED} where generation of a single sequence went so far. Keep "
                "copy.deepcopy(past_key_values) of the place to return to"
            )

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        def changed(state: Any) -> Any:
            return None if state is None else type(state)(*(change(tensor) for tensor in state))

        if self.state is not None:
            self.state, self._stretches = changed(self.state), []
            return
        for stretch in self._stretches:
            stretch.before = changed(stretch.before)
            stretch.passes = [inputs.each(change) for inputs in stretch.passes]


def state_layer(cache: Any, index: int) -> StateLayer:
    """The layer of that index of a cache, made one of ours if it is not yet."""
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
