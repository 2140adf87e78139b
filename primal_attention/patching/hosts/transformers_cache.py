"""The constant-size state of a patched layer, inside the cache of Hugging Face transformers.

Letters: B batch, N tokens, D model dim, G key heads, C head dim.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from primal_attention.patching.hosts.transformers_attention import Inputs


class StateLayer(CacheLayerMixin):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """One layer of a ``Cache``: the state of a mechanism in place of keys and values.

    The state is a NamedTuple of tensors of constant size, batch first. Sums cannot be taken back,
    so the last tokens of a single sequence are kept beside the state before them.

    Args:
        key: The key of one token as the host has it, [1, G, 1, C], on the ``meta`` device.
    """

    is_croppable = True
    is_sliding = supports_early_init = False
    is_initialized = False  # there are no keys to move, where the host offloads its cache
    remembered = 128  # so many of the last tokens can be removed again

    def __init__(self, key: Tensor) -> None:
        self.key = key
        self.num_tokens: Any = 0  # an int
        self.state: Any = None  # None before the first token, or where it is yet to be computed
        self._stretches: list[tuple[Any, Inputs]] = []  # two at most: a state and what follows it

    @property
    def is_started(self) -> bool:
        """True once there were tokens."""
        return self.state is not None or bool(self._stretches)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override, unused-ignore]
        """The shape of the keys (and values) of all tokens so far, without data."""
        if not self.is_started:
            return None
        first = self._stretches[-1][1].x if self.state is None else self.state[0]
        return self.key.expand(len(first), -1, int(self.get_mask_sizes(0)[0]), -1)

    values = keys

    def read(self, extend: Callable[[Inputs, Any], Any]) -> Any:
        """Return the state after the tokens so far; None before the first."""
        if self.state is None and self._stretches:
            before, tokens = self._stretches[-1]
            self.state = extend(tokens, before)
        return self.state

    def keep(self, state: Any, new: Inputs) -> None:
        """Keep the state after more tokens, and the tokens where they can be removed again."""
        if len(new.x) > 1 or new.length > self.remembered or torch.compiler.is_compiling():
            self._stretches = []
        else:
            tokens, stretches = new.each(lambda t: t.detach().clone()), self._stretches
            if stretches and stretches[-1][1].length < self.remembered:
                before, earlier = stretches.pop()
                stretches.append((before, earlier.followed_by(tokens)))
            else:
                self._stretches = [*stretches[-1:], (self.state, tokens)]
        self.state = state
        self.num_tokens += new.length

    def postpone(self, new: Inputs) -> None:
        """Keep the tokens of a first pass, which is not likely to be continued."""
        self.state, self._stretches = None, [(None, new)]
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
        """Remove the last ``-tokens_to_remove`` tokens; a positive number says how many stay."""
        keeps = tokens_to_remove > 0  # as in transformers before 5
        remaining = max(int(self.num_tokens) * keeps - tokens_to_remove, 0)
        if remaining and remaining >= self.num_tokens:
            self.reset()
            return
        known = sum(tokens.length for _, tokens in self._stretches)
        if remaining > known:
            raise ValueError(
                f"cannot remove {remaining} of {int(self.num_tokens)} tokens from the state of a "
                f"patched layer, which is a sum over all of them; {known} can be removed here, at "
                f"least {self.remembered} where generation of a single sequence went so far. Keep "
                "copy.deepcopy(past_key_values) of the place to return to"
            )
        self.num_tokens -= remaining
        while remaining:
            before, tokens = self._stretches.pop()
            left = max(tokens.length - remaining, 0)
            remaining -= tokens.length - left
            self.state = None if left else before
            if left:
                self._stretches.append((before, tokens.each(lambda t, left=left: t[:, :left])))  # type: ignore[misc]

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

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            self.state, self._stretches = type(self.state)(*map(change, self.state)), []
        else:  # postponed
            self._stretches = [(None, tokens.each(change)) for _, tokens in self._stretches]


class StaticStateLayer(StateLayer):  # type: ignore[no-untyped-call, unused-ignore]
    """A layer of a cache of fixed size, for graphs that are compiled once for all tokens.

    The number of tokens is a tensor, and the state stays where it is in memory.
    """

    is_compileable, is_croppable = True, False

    def __init__(self, key: Tensor, max_tokens: int) -> None:
        super().__init__(key)
        self.max_tokens = max_tokens
        self.num_tokens = torch.tensor(0)

    def keep(self, state: Any, new: Inputs) -> None:
        """Overwrite the state, in place unless it is the first or has grown."""
        held = self.state
        if held is None or any(a.shape != b.shape for a, b in zip(held, state, strict=True)):
            self.state = type(state)(*(tensor.clone() for tensor in state))
            self.num_tokens = self.num_tokens.to(state[0].device)
            if not torch.compiler.is_compiling():
                for tensor in (*self.state, self.num_tokens):  # CUDA graphs take them in place
                    torch._dynamo.mark_static_address(tensor)
        else:
            for old, after in zip(held, state, strict=True):
                old.copy_(after)
        self._stretches = []
        self.num_tokens.add_(new.length)

    def get_seq_length(self) -> Any:
        """Number of tokens so far: a tensor from the first on."""
        return self.num_tokens if self.is_started else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the mask, which covers the whole cache."""
        return self.max_tokens, 0

    def get_max_length(self) -> int:
        """Return the size of the cache."""
        return self.max_tokens

    def reset(self) -> None:
        """Forget all tokens."""
        self.num_tokens.zero_()
        self.state, self._stretches = None, []


def state_layer(cache: Any, index: int, key: Tensor) -> StateLayer:
    """Return a layer of a cache by its index, replaced by a state layer if it is none yet."""
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
        there = StaticStateLayer(key, there.max_cache_len) if static else StateLayer(key)
        layers[index] = there
    found: StateLayer = there
    return found
